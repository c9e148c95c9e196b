"""The benchmark stage, with the process of lm-evaluation-harness: a killed run, errors of tasks, a real engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.benchmark import BenchmarkConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.evaluation.harness.records import flat_metrics
from rlhf_core.rollout.engine import Request
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.stages import benchmark
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.types import Completion
from tests.rlhf_core.evaluation.harness.task_files import (
    CHOICE,
    READ,
    SAY,
    Float64Engine,
    evaluated,
    settings,
    task_folder,
)
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import base_model, context_of, no_cluster

pytestmark = pytest.mark.parts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    return base_model(tmp_path_factory.mktemp("base"), seed=3, hidden=64)


class Stopped(Float64Engine):
    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        if requests[0].parameters.stop_token_ids:  # a task's completions, after its choices
            raise StageError("stopped")
        return super().generate(requests)


def context_at(folder: Path, model: Input) -> LocalContext:
    context = context_of(folder / "work", {"model": model})
    context.user_files_root = folder
    return context


def run(config: BenchmarkConfig, model: Input, folder: Path, engine: Float64Engine) -> Output:
    cluster = InProcessCluster(lambda *_: nullcontext(InlineEngines(engine)))
    return benchmark.run(config, {"model": model}, context_at(folder, model), cluster)


def exact(
    config: BenchmarkConfig, model: Input, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and results in this process, of a float64 model."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.chdir(folder / "tasks")
    return evaluated(config, folder / "tasks", Float64Engine(model.folder), model.folder)


def rows_of(output: Output) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output.folder / "samples.jsonl").read_text("utf-8").splitlines()]


def test_answers_of_a_killed_run_are_used_again(model: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task_folder(tmp_path / "tasks", choice=CHOICE, say=SAY)
    config = settings("choice", "say", requests_per_call=4)
    with pytest.raises(StageError, match="stopped"):
        run(config, model, tmp_path, Stopped(model.folder))
    resumed = Float64Engine(model.folder)
    output = run(config, model, tmp_path, resumed)
    assert resumed.calls == [("generate", 4), ("generate", 2)]
    rows, results = exact(config, model, tmp_path, monkeypatch)
    assert output.kind is Kind.EVALUATION
    assert rows_of(output) == rows
    assert json.loads((output.folder / "results.json").read_text("utf-8")) == results
    assert output.metrics == flat_metrics(results)


def test_an_error_of_the_code_of_a_task_names_its_place(model: Input, tmp_path: Path) -> None:
    task_folder(tmp_path / "tasks", choice=f"{CHOICE}process_docs: !function code.none\n")
    (tmp_path / "tasks" / "code.py").write_text("def none(docs):\n    return docs[1 // 0]\n")
    with pytest.raises(StageError, match=r"(?s)raised ZeroDivisionError.*tasks/code.py"):
        benchmark.run(settings("choice"), {"model": model}, context_at(tmp_path, model), no_cluster)


@pytest.mark.endurance("architectures")
def test_vllm_has_the_log_probs_and_scores_of_a_float64_model(
    model: Input, in_process: InProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_folder(tmp_path / "tasks", choice=CHOICE, say=SAY, read=READ)
    config = settings("choice", "say", "read")
    output = benchmark.run(config, {"model": model}, context_at(tmp_path, model), in_process)
    rows, results = exact(config, model, tmp_path, monkeypatch)
    for mine, its in zip(rows_of(output), rows, strict=True):
        assert (mine["id"], mine["prompt"], mine["completions"]) == (its["id"], its["prompt"], its["completions"])
        for request, other in zip(mine["requests"], its["requests"], strict=True):
            assert request["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert request["greedy"] == other["greedy"]
    assert output.metrics == pytest.approx(flat_metrics(results), rel=1e-5)
