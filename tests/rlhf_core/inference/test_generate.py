"""`alignment generate` on a real engine, and the prompts that it reads."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.chat.encoding import encode_prompt, load_tokenizer
from rlhf_core.data.formats import Row, canonical_row
from rlhf_core.errors import RecipeError, StageError
from rlhf_core.inference.generate import OpenEngine, Request, generate
from rlhf_core.inference.prompts import read_prompts
from rlhf_core.inference.settings import engine_config, sampling_config
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.child_engine import ChildEngine
from rlhf_core.rollout.engine import EngineSettings
from tests.rlhf_core.stages.supervised_runs import base_model

pytestmark = pytest.mark.parts

SETTINGS = EngineSettings(engine_config(["cpu_cache_gib=0.05", "threads=1"], max_length=1), "float32", seed=0)
ASKED = [{"prompt": f"say {word}", "answer": word} for word in ("a", "be", "see")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("model"), hidden=64).folder


@pytest.fixture
def in_process(engine_process: ChildProcess) -> OpenEngine:
    @contextmanager
    def opened(folder: Path, settings: EngineSettings) -> Iterator[ChildEngine]:
        engine = ChildEngine(engine_process, folder, settings)
        yield engine
        engine.shutdown()

    return opened


def sampled(folder: Path, open_engine: OpenEngine, samples: int, seed: int, asked: Sequence[Any] = ASKED) -> list[Row]:
    rows: list[Row] = []
    request = Request(samples, sampling_config(max_tokens=6, temperature=0.7), seed, tokens=True)
    prompts = [canonical_row(row, "prompts", {}) for row in asked]
    generate(folder, load_tokenizer(folder), prompts, request, SETTINGS, rows.extend, open_engine)
    return rows


@pytest.mark.slow("the first of its file, for which an engine starts")
def test_completions_have_the_tokens_and_log_probs_of_the_model(folder: Path, in_process: OpenEngine) -> None:
    rows = sampled(folder, in_process, samples=2, seed=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    assert [row["answer"] for row in rows] == ["a", "be", "see"]
    for row in rows:
        read = canonical_row(row, "completions", {})
        assert [each["text"] for each in read["completions"]] == [each["text"] for each in row["completions"]]
        assert len(row["completions"]) == 2
        prompt = encode_prompt(tokenizer, row["prompt"])
        for each in row["completions"]:
            tokens = each["token_ids"]
            assert each["finish_reason"] == ("stop" if tokens[-1] == tokenizer.eos_token_id else "length")
            assert each["tokens"] == len(tokens) <= 6
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
            assert each["logprobs"] == pytest.approx(expected, abs=1e-4)
    first = [sampled(folder, in_process, samples=2, seed=seed, asked=ASKED[:1])[0] for seed in (1, 2)]
    assert first[0] == rows[0]
    assert first[1] != rows[0]


def test_a_prompt_without_room_is_shown(folder: Path, in_process: OpenEngine) -> None:
    with pytest.raises(StageError, match=r"the prompt 'xx.*' has \d+ tokens, and with .* context of 64: shorten it"):
        sampled(folder, in_process, samples=1, seed=0, asked=[{"prompt": "x" * 60}])


def test_prompts_come_from_files_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ASKED))

    def asked(source: str, *, lines: bool = False, system: str | None = None) -> list[Any]:
        return [row["prompt"] for row in read_prompts(source, lines=lines, system=system)]

    texts = [[{"role": "user", "content": row["prompt"]}] for row in ASKED]
    assert asked(str(path)) == texts
    kind = {"role": "system", "content": "be kind"}
    assert asked(str(path), system="be kind") == [[kind, *turns] for turns in texts]
    monkeypatch.setattr("sys.stdin", standard_input(path.read_text()))
    assert asked("-") == texts
    monkeypatch.setattr("sys.stdin", standard_input("say a\n\n say {b} \r\n"))
    assert [turns[0]["content"] for turns in asked("-", lines=True)] == ["say a", " say {b} "]


@pytest.mark.parametrize(
    ("content", "lines", "message"),
    [
        ('{"prompt": "a"}\n{"name": "b"}\n', False, r"^standard input line 2: no column `prompt`.*; it has name$"),
        ('{"prompt": "a"}\n{"prompt": \n', False, "^standard input line 2: not JSON"),
        ('{"prompt": "u", "system": "be honest"}', False, "^standard input line 1: .*turn already: remove it, or omit"),
        ("a\n\udcff\n", True, "^standard input line 2: not UTF-8 text"),
        ("\n \n", True, "^standard input: there is no prompt in it"),
        ("", False, "^standard input: there is no prompt in it"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch, content: str, lines: bool, message: str
) -> None:
    monkeypatch.setattr("sys.stdin", standard_input(content))
    with pytest.raises(RecipeError, match=message):
        read_prompts("-", lines=lines, system="be kind")


def standard_input(content: str) -> Any:
    return SimpleNamespace(buffer=io.BytesIO(content.encode(errors="surrogateescape")), isatty=lambda: False)
