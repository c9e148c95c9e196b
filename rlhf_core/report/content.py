"""The content of the report, collected from the manifests and files of a run's artifacts. Draws nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.contract import Input
from rlhf_core.evaluation.comparison import compare
from rlhf_core.report.formatting import main_metrics
from rlhf_core.tracking.protocol import METRICS_FILE, SAMPLES_FILE, read_jsonl

Curves = dict[str, list[tuple[float, float]]]  # metric name -> (step, value)
Answers = Mapping[str, list[dict[str, Any]]]  # model -> the rows of its evaluation


@dataclass(frozen=True)
class StageRow:
    name: str
    kind: str
    key: str
    seconds: float
    device_seconds: float
    device: str
    seed: int | None  # none: nothing was drawn at random
    metrics: str


@dataclass(frozen=True)
class SampleRow:
    prompt: str
    answer: str
    completions: dict[str, tuple[str, float]]  # model -> greedy completion, main score


@dataclass(frozen=True)
class Content:
    stages: list[StageRow]
    evaluations: dict[str, dict[str, Any]]  # model -> the evaluation manifest's metrics
    differences: list[Difference]
    samples: list[SampleRow]
    curves: dict[str, Curves]  # node -> its metrics
    edges: list[tuple[str, str]]  # node -> node that reads it


@dataclass(frozen=True)
class Difference:
    """By how much one model's greedy score exceeds another's on the same prompts, with a 95 % bootstrap interval."""

    scorer: str
    before: str
    after: str
    mean: float
    low: float
    high: float
    prompts: int


def gather(nodes: Mapping[str, Input], *, samples: int) -> Content:
    """nodes: the run's artifacts by node name, in the order of the run."""
    by_model = {name.removeprefix("evaluation."): i for name, i in nodes.items() if i.manifest.kind == Kind.EVALUATION}
    answers = {model: read_jsonl(evaluation.folder / SAMPLES_FILE) for model, evaluation in by_model.items()}
    return Content(
        stages=[_stage_row(name, item) for name, item in nodes.items()],
        evaluations={model: dict(evaluation.manifest.metrics) for model, evaluation in by_model.items()},
        differences=[difference for comparable in _by_prompts(answers) for difference in _differences(comparable)],
        samples=[row for comparable in _by_prompts(answers) for row in _sample_rows(comparable, samples)],
        curves={name: curves for name, item in nodes.items() if (curves := _curves(item.folder / METRICS_FILE))},
        edges=_edges(nodes),
    )


def _stage_row(name: str, item: Input) -> StageRow:
    m = item.manifest
    return StageRow(
        name=name,
        kind=m.kind.value,
        key=m.key[:12],
        seconds=(m.finished_at - m.started_at).total_seconds(),
        device_seconds=m.device_seconds,
        device=m.device,
        seed=m.seed,
        metrics=main_metrics(m.metrics),
    )


def _edges(nodes: Mapping[str, Input]) -> list[tuple[str, str]]:
    names = {item.manifest.ref.path: name for name, item in nodes.items()}
    return [
        (names[parent.path], name)
        for name, item in nodes.items()
        for parent in item.manifest.parents.values()
        if parent.path in names
    ]


def _curves(path: Path) -> Curves:
    curves: Curves = {}
    if path.exists():  # only stages that train log metrics
        for line in read_jsonl(path):
            for name, value in line.items():
                if name not in ("step", "time") and isinstance(value, int | float):
                    curves.setdefault(name, []).append((line["step"], value))
    return curves


def _by_prompts(answers: Answers) -> list[Answers]:
    """Evaluations apart that answer other prompts or have other scorers: only within each can models be compared."""
    comparable: dict[tuple[frozenset[str], frozenset[str]], dict[str, list[dict[str, Any]]]] = {}
    for model, rows in answers.items():
        key = frozenset(row["id"] for row in rows), frozenset(_greedy(rows[0])["scores"])
        comparable.setdefault(key, {})[model] = rows
    return list(comparable.values())


def _differences(answers: Answers) -> list[Difference]:
    """Compare each model with the one before it in the recipe, and the last with the first."""
    models = list(answers)
    pairs = list(itertools.pairwise(models))
    if len(models) > 2:
        pairs.append((models[0], models[-1]))
    return [
        _difference(scorer, before, after, answers[before], answers[after])
        for before, after in pairs
        for scorer in _greedy(answers[before][0])["scores"]
    ]


def _difference(
    scorer: str, before: str, after: str, old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> Difference:
    found = compare(old, new, scorer)
    return Difference(scorer, before, after, found.value, found.low, found.high, len(new))


def _greedy(row: dict[str, Any]) -> dict[str, Any]:
    completion: dict[str, Any] = row["completions"][0]
    return completion


def _sample_rows(answers: Answers, count: int) -> list[SampleRow]:
    """A fixed random sample of the prompts, independent of the models' scores."""
    first = next(iter(answers.values()))
    indices = random.Random(0).sample(range(len(first)), min(count, len(first)))
    rows = {model: {row["id"]: row for row in model_rows} for model, model_rows in answers.items()}
    samples = []
    for index in sorted(indices):
        row = first[index]
        greedy = {model: _greedy(by_id[row["id"]]) for model, by_id in rows.items()}
        completions = {m: (c["text"], float(next(iter(c["scores"].values())))) for m, c in greedy.items()}
        samples.append(SampleRow(row["prompt"], str(row.get("answer", "")), completions))
    return samples
