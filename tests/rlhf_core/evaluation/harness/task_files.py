"""Task files of lm-evaluation-harness, an engine that computes in float64, and the harness in the tests' process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlhf_core.chat.encoding import load_tokenizer, stop_token_ids
from rlhf_core.config.stages.benchmark import BenchmarkConfig
from rlhf_core.evaluation.harness.answering import EngineAnswers
from rlhf_core.evaluation.harness.records import sample_rows, summarise
from rlhf_core.evaluation.harness.running import run_tasks
from rlhf_core.rollout.engine import Request, RolloutEngine, ServedTensor
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.transport.base import Transport, WeightManifest
from rlhf_core.types import Completion

ROWS: list[dict[str, Any]] = [
    {"question": "say a", "choices": ["a", "b", "cd"], "gold": 0},
    {"question": "say b", "choices": ["ba", "b", "c"], "gold": 1},
    {"question": "say cd", "choices": ["a", "b", "cd"], "gold": 2},
    # One of these is right, whatever a model prefers.
    *({"question": "say abc", "choices": ["abc", "bca", "cab"], "gold": gold} for gold in range(3)),
]
DATA = """\
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
"""
CHOICE = f"""\
task: choice
{DATA}output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
SAY = f"""\
task: say
{DATA}output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: ["b"], max_gen_toks: 4, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
filter_list:
  - name: first
    filter: [{{function: regex, regex_pattern: "([a-z])"}}, {{function: take_first}}]
  - name: whole
    filter: [{{function: take_first}}]
"""
READ = f"""\
task: read
{DATA}output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}} {{{{question}}}}"
metric_list:
  - {{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
  - {{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}
"""


def task_folder(folder: Path, rows: Sequence[dict[str, Any]] = tuple(ROWS), **tasks: str) -> Path:
    """Write a task folder. tasks: name of a file -> its YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


class Float64Engine(RolloutEngine):
    """A model of transformers in float64. `calls` has the method and the number of items of each call."""

    def __init__(self, folder: Path, max_length: int = 64) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self._max_length = max_length
        self.calls: list[tuple[str, int]] = []

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.calls.append(("logprobs", len(sequences)))
        assert all(len(sequence) <= self._max_length for sequence in sequences)
        return [[0.0, *self.continuation(sequence[:1], sequence[1:])] for sequence in sequences]

    @torch.no_grad()
    def continuation(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the log-prob of each of `tokens` after `context`."""
        logits = self._model(torch.tensor([[*context, *tokens]])).logits[0]
        rows = logits.log_softmax(-1)[len(context) - 1 : -1]
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int, stops: Sequence[int] = ()) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count and not (tokens and tokens[-1] in stops):
            tokens.append(int(self._model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
        return tokens

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        self.calls.append(("generate", len(requests)))
        completions = []
        for request in requests:
            stops = request.parameters.stop_token_ids
            tokens = self.greedy(request.prompt, request.parameters.max_tokens, stops)
            completions.append(Completion(tokens, [0.0] * len(tokens), "stop" if tokens[-1] in stops else "length", 0))
        return completions

    @property
    def weight_version(self) -> int:
        return 0

    def load_weights(self, transport: Transport, manifest: WeightManifest) -> None:
        raise NotImplementedError

    def served(self) -> tuple[ServedTensor, ...]:
        return ()


def settings(*tasks: str, **changes: Any) -> BenchmarkConfig:
    rollout = {"max_length": 64, "cpu_cache_gib": 0.05, "cpus_per_engine": 0.5}
    common: dict[str, Any] = {"tasks": tasks, "task_folder": "tasks", "max_tokens": 8, "rollout": rollout}
    return BenchmarkConfig.model_validate_json(json.dumps(common | changes))


def evaluated(
    config: BenchmarkConfig, folder: Path, engine: Float64Engine, model: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the lines of samples.jsonl and the content of results.json. folder: of the tasks, the working folder."""
    answers = EngineAnswers(lambda: InlineEngines(engine), stop_token_ids(load_tokenizer(model)), seed=0)
    rows: list[dict[str, Any]] = []

    def exchange(message: Mapping[str, Any]) -> Any:
        message = json.loads(json.dumps(message))
        if "rows" in message:
            rows.extend(message["rows"])
            return None
        return json.loads(json.dumps(getattr(answers, message["ask"])(message["first"], message["items"])))

    whole = {
        **config.model_dump(mode="json"), "folder": str(folder), "model": str(model),
        "max_length": config.rollout.max_length, "seed": 0,
    }  # fmt: skip
    summary = summarise(rows, run_tasks(whole, exchange), seed=0)
    return list(sample_rows(rows, summary)), summary
