"""Sampling as a stage, and the datasets made of the samples: with the scripted engine, and whole on a real one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_prompt, load_tokenizer
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.config.stages.sampled import (
    BestOfNConfig,
    ConditionalConfig,
    GenerateConfig,
    PairsConfig,
    UnpairedConfig,
)
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import read_rows, write_dataset
from rlhf_core.errors import StageError
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.stages import base, generate, sampled
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import context_of, dataset

pytestmark = pytest.mark.parts

SETTINGS: dict[str, Any] = {
    "dataset": "prompts", "samples": 3, "sampling": {"max_tokens": 4},
    "rewards": {"exact": {"type": "verifier", "weight": 2.0}, "short": {"type": "verifier", "pattern": "(.)"}},
    "rollout": {"max_length": 32, "cpu_cache_gib": 0.05, "cpus_per_engine": 0.5},
}  # fmt: skip
ROWS = [{"prompt": [{"role": "user", "content": f"say {word}"}], "answer": word} for word in "abcde"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    source = ScratchModel(type="scratch", hidden_size=64, intermediate_size=64, layers=1, heads=2, context_length=64)
    made = base.run(BaseModelConfig(source=source, dtype="float32"), {}, LocalContext(folder / "base"))
    return {"model": local_input(made.folder, Kind.POLICY), "dataset": dataset(folder / "prompts", ROWS)}


def settings(**changes: Any) -> GenerateConfig:
    return GenerateConfig.model_validate_json(json.dumps({**SETTINGS, **changes}))


def letters(inputs: dict[str, Input]) -> ScriptedEngine:
    """Says a letter that depends on the seed alone, mostly twice."""
    tokenizer = load_tokenizer(inputs["model"].folder)

    def script(prompt: Sequence[int], seed: int | None) -> list[int]:
        assert seed is not None
        letter = tokenizer.convert_tokens_to_ids("abcdefgh"[seed % 8])
        return [letter] * (1 + seed % 2) + [tokenizer.eos_token_id]

    return ScriptedEngine(script)


def run(folder: Path, inputs: dict[str, Input], config: GenerateConfig) -> Output:
    engine = letters(inputs)
    cluster = InProcessCluster(lambda *_: nullcontext(InlineEngines(engine)))
    return generate.run(config, inputs, context_of(folder, inputs), cluster)


def test_every_prompt_has_its_completions(inputs: dict[str, Input], tmp_path: Path) -> None:
    output = run(tmp_path, inputs, settings())
    rows = read_rows(output.folder)
    assert output.kind == Kind.DATASET
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS]
    assert {len(row["completions"]) for row in rows} == {3}
    entries = [(row, entry) for row, asked in zip(rows, ROWS, strict=True) for entry in row["completions"]]
    answers = [asked["answer"] for asked in ROWS for _ in range(3)]
    for (_, entry), answer in zip(entries, answers, strict=True):
        right = float(entry["text"] == answer)
        assert entry["rewards"]["exact"] == right
        assert entry["reward"] == pytest.approx(2 * right + entry["rewards"]["short"])
        assert entry["logprob"] < 0
    mean = sum(entry["reward"] for _, entry in entries) / 15
    best = sum(max(entry["reward"] for entry in row["completions"]) for row in rows) / 5
    expected = {
        "rows": 5,
        "completions": 15,
        "truncated_completions": 0,
        "reward": mean,
        "best_reward": best,
        "rows_read": 5,
    }
    assert output.metrics == pytest.approx(expected)


def test_how_many_prompts_are_given_at_a_time_changes_nothing(inputs: dict[str, Input], tmp_path: Path) -> None:
    whole = run(tmp_path / "1", inputs, settings()).folder / "data.arrow"
    parts = run(tmp_path / "2", inputs, settings(prompts_per_call=2)).folder / "data.arrow"
    assert whole.read_bytes() == parts.read_bytes()


def test_pairs_and_the_best_are_made_of_them(inputs: dict[str, Input], tmp_path: Path) -> None:
    completions = {"dataset": local_input(run(tmp_path / "sampled", inputs, settings(samples=8)).folder, Kind.DATASET)}
    rows = {row["id"]: row for row in read_rows(completions["dataset"].folder)}
    output = sampled.pairs(PairsConfig(dataset="d", select="all"), completions, LocalContext(tmp_path / "pairs"))
    pairs = read_rows(output.folder)
    assert output.metrics["rows"] == len(pairs) > 5
    reward = {
        (json.dumps(row["prompt"]), entry["text"]): entry["reward"]
        for row in rows.values()
        for entry in row["completions"]
    }
    for pair in pairs:
        chosen, rejected = (reward[json.dumps(pair["prompt"]), pair[side]] for side in ("chosen", "rejected"))
        assert chosen > rejected
    best = sampled.best_of_n(BestOfNConfig(dataset="d"), completions, LocalContext(tmp_path / "best"))
    for row, conversation in zip(rows.values(), read_rows(best.folder), strict=True):
        *asked, reply = conversation["messages"]
        assert asked == row["prompt"]
        assert reward[json.dumps(asked), reply["content"]] == max(entry["reward"] for entry in row["completions"])


def test_nothing_left_is_an_error(inputs: dict[str, Input], tmp_path: Path) -> None:
    made = run(tmp_path / "sampled", inputs, settings())
    completions = {"dataset": local_input(made.folder, Kind.DATASET)}
    with pytest.raises(StageError, match=r"rewards are more than 5 apart: .*5 prompts without pair; sample more"):
        sampled.pairs(PairsConfig(dataset="d", margin=5.0), completions, LocalContext(tmp_path / "pairs"))
    with pytest.raises(StageError, match="5 prompts left out; lower `least_reward`"):
        sampled.best_of_n(BestOfNConfig(dataset="d", least_reward=9.0), completions, LocalContext(tmp_path / "best"))
    for name, rows in (("equal", [("a", 0.51), ("b", 0.52)]), ("none", [(" ", 0.0), ("", 1.0)])):
        entries = [{"text": text, "reward": reward} for text, reward in rows]
        asked = [{"role": "user", "content": "2+2?"}]
        write_dataset(tmp_path / name, [{"id": "r", "prompt": asked, "completions": entries}], {})
        given = {"dataset": local_input(tmp_path / name, Kind.DATASET)}
        what = "all 2 completions have the reward 0.5" if name == "equal" else "none is left; .*2 empty completions"
        with pytest.raises(StageError, match=f"no completions of different rewards .{what}.*more `decimals`"):
            sampled.conditional_conversations(
                ConditionalConfig(dataset="d"), given, LocalContext(tmp_path / f"{name}-told")
            )
    with pytest.raises(StageError, match=r"every completion is empty: .*2 empty completions.*; give it other rows"):
        sampled.best_of_n(BestOfNConfig(dataset="d"), given, LocalContext(tmp_path / "empty"))


def test_labels_of_one_kind_are_an_error(inputs: dict[str, Input], tmp_path: Path) -> None:
    made = run(tmp_path / "sampled", inputs, settings())
    completions = {"dataset": local_input(made.folder, Kind.DATASET)}

    def labelled(name: str, threshold: float) -> Output:
        config = UnpairedConfig(dataset="d", threshold=threshold)
        return sampled.unpaired(config, completions, LocalContext(tmp_path / name))

    output = labelled("both", 0.5)
    assert output.metrics["rows"] == len(read_rows(output.folder)) > 5
    with pytest.raises(StageError, match=r"no completion is desirable .*: 0 desirable, .*; lower `threshold`"):
        labelled("bad", 9.0)
    with pytest.raises(StageError, match=r"no completion is undesirable .*, 0 undesirable, .*; raise `threshold`"):
        labelled("good", -1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"max_tokens": 4, "temperature": 0.0}}, "would be alike"),
        ({"rewards": {"exact": {"type": "verifier", "tolerated_failures": 0.5}}}, "every completion needs its reward"),
        ({"rewards": {"all": {"type": "environment"}}}, "there is no reward of a completion `environment`"),
        (
            {"reference": {"model": "base"}, "sampling": {"max_tokens": 4, "top_p": 0.9}},
            "but sampling.top_p makes them",
        ),
        ({"reference": {"model": "base"}, "sampling": {"max_tokens": 4, "temperature": 0.7}}, "sampling.temperature"),
        ({"engine": {"dtype": "float32"}}, "engine is for models that read the completions, but there is no reward"),
        ({"placement": {"workers": 2}}, "placement is for models that read the completions, but there is no reward"),
        (
            {"rewards": {"taste": {"type": "reward_model", "engine": {"attention": "flash_attention_2"}}}},
            "flash_attention_2 needs a GPU",
        ),
        ({"rewards": {"taste": {"type": "reward_model", "engine": {"attention": "flex"}}}}, "flex needs a GPU"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.mark.slow("starts vLLM")
def test_a_real_engine_gives_the_log_probs_of_the_model(
    inputs: dict[str, Input], in_process: InProcessCluster, tmp_path: Path
) -> None:
    output = generate.run(settings(rewards={}), inputs, context_of(tmp_path, inputs), in_process)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(inputs["model"].folder),
        load_tokenizer(inputs["model"].folder),
    )
    checked = 0
    for row in read_rows(output.folder):
        assert "reward" not in row["completions"][0]
        prompt = encode_prompt(tokenizer, row["prompt"])
        for entry in row["completions"]:
            reply = tokenizer(entry["text"], add_special_tokens=False)["input_ids"]
            if len(reply) != 4:
                continue  # ended by itself, or with special tokens that its text does not show
            checked += 1
            with torch.no_grad():
                scores = torch.log_softmax(model(input_ids=torch.tensor([prompt + reply])).logits[0, :-1], dim=-1)
            expected = scores[len(prompt) - 1 :].gather(-1, torch.tensor(reply)[:, None]).sum().item()
            assert math.isclose(entry["logprob"], expected, abs_tol=1e-3)
    assert checked > 5
