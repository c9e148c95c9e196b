"""Content of the report, collected from the manifests and files of a run's artifacts, without any drawing."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.gates import GATES, gate_of
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.image_messages import is_image_name
from rlhf_core.config.texts import is_blank
from rlhf_core.contract import Input
from rlhf_core.evaluation.comparison import compare, questions, scorers_of
from rlhf_core.evaluation.summary import uniformity
from rlhf_core.report.formatting import main_metrics
from rlhf_core.tracking.protocol import METRICS_FILE, SAMPLES_FILE, VERDICT_FILE, read_jsonl

Curves = dict[str, list[tuple[float, float]]]  # metric name -> (step, value)
Answers = Mapping[str, list[dict[str, Any]]]  # node, or model -> the rows of its evaluation


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
    change: float  # the main score of the last model minus that of the first; 0 with one model
    images: tuple[str, ...] = ()  # of the prompt, by their SHA-256: files of the set's `node`


@dataclass(frozen=True)
class EvaluationSet:
    """Evaluations of the same prompts by the same scorers, the only ones that are comparable."""

    name: str  # of the stages
    node: str  # of its first evaluation
    prompts: int
    evaluations: dict[str, dict[str, Any]]  # model -> the evaluation manifest's metrics
    blank: dict[str, str]  # model -> how many of its completions are blank, where any model has such
    notes: list[str]
    differences: list[Difference]
    samples: list[SampleRow]
    worse: int  # prompts that the last model answers with a lower main score than the first
    better: int

    @property
    def result(self) -> Difference | None:
        """The difference of the last model to the first by the main scorer; None if there is one model."""
        if not self.differences:
            return None
        last = self.differences[-1]
        return next(each for each in self.differences if (each.before, each.after) == (last.before, last.after))


@dataclass(frozen=True)
class GateVerdict:
    """The verdict of a gate on a candidate."""

    name: str  # of the node
    accepted: bool
    reason: str
    candidate: str  # the artifacts
    baseline: str
    comparisons: list[dict[str, Any]]  # fields of evaluation.verdict.Comparison


@dataclass(frozen=True)
class Model:
    """The model that a run made, as commands name it."""

    node: str
    ref: str
    is_reward_model: bool


@dataclass(frozen=True)
class Content:
    model: Model | None  # None: the run made none
    verdicts: list[GateVerdict]
    stages: list[StageRow]
    sets: list[EvaluationSet]
    curves: dict[str, Curves]  # node -> its metrics
    edges: list[tuple[str, str]]  # node -> node that reads it


@dataclass(frozen=True)
class Difference:
    """Difference of two models' greedy scores on the same prompts, with a 95 % bootstrap interval."""

    scorer: str
    before: str
    after: str
    value: float
    low: float
    high: float
    prompts: int


def gather(nodes: Mapping[str, Input], *, samples: int) -> Content:
    """Collect the content. nodes: the run's artifacts by node name, in the order of the run."""
    evaluations = {name: item for name, item in nodes.items() if item.manifest.kind == Kind.EVALUATION}
    answers = {name: read_jsonl(item.folder / SAMPLES_FILE) for name, item in evaluations.items()}
    return Content(
        model=_model(nodes),
        verdicts=[_verdict(name, item) for name, item in nodes.items() if item.manifest.kind in GATES],
        stages=[_stage_row(name, item) for name, item in nodes.items()],
        sets=[_set(evaluations, comparable, samples) for comparable in _by_prompts(answers)],
        curves={name: curves for name, item in nodes.items() if (curves := curves_of(item.folder / METRICS_FILE))},
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


def _model(nodes: Mapping[str, Input]) -> Model | None:
    """Return the candidate of the last gate, else the last policy or adapter, else the last reward model."""
    made = {item.manifest.ref: (name, item.manifest) for name, item in nodes.items()}
    chosen = [
        *(gate_of(item.manifest).candidate for item in nodes.values() if item.manifest.kind in GATES),
        *(ref for ref, (_, m) in reversed(made.items()) if m.kind in (Kind.POLICY, Kind.ADAPTER)),
        *(ref for ref, (_, m) in reversed(made.items()) if m.kind == Kind.REWARD_MODEL),
    ]
    for ref in chosen:
        if ref in made:
            name, manifest = made[ref]
            return Model(name, str(ref), manifest.kind == Kind.REWARD_MODEL)
    return None


def _verdict(name: str, item: Input) -> GateVerdict:
    content = json.loads((item.folder / VERDICT_FILE).read_text(encoding="utf-8"))
    gate = gate_of(item.manifest)
    return GateVerdict(
        name, content["accepted"], content["reason"], candidate=str(gate.candidate), baseline=str(gate.baseline),
        comparisons=content.get("comparisons", []),  # rounds of earlier releases have none
    )  # fmt: skip


def _set(nodes: Mapping[str, Input], comparable: Answers, samples: int) -> EvaluationSet:
    """Collect one set. comparable: rows of its evaluations, by node."""
    stages = dict.fromkeys(name.partition(".")[0] for name in comparable)
    labels = {name: name.partition(".")[2] or name if len(stages) == 1 else name for name in comparable}
    answers = {labels[name]: rows for name, rows in comparable.items()}
    texts = {model: [c["text"] for row in rows for c in row["completions"]] for model, rows in answers.items()}
    blank = {model: sum(map(is_blank, completions)) for model, completions in texts.items()}
    rows = _sample_rows(answers)
    notes = [f"{model}: {note}" for model, of_model in answers.items() if (note := _uniformity(of_model))]
    return EvaluationSet(
        name=", ".join(stages),
        node=next(iter(comparable)),
        prompts=len(next(iter(answers.values()))),
        evaluations={labels[name]: _metrics(nodes[name]) for name in comparable},
        blank={model: f"{number} of {len(texts[model])}" for model, number in blank.items()}
        if any(blank.values())
        else {},
        notes=notes,
        differences=_differences(answers),
        samples=_most_changed(rows, samples),
        worse=sum(row.change < 0 for row in rows),
        better=sum(row.change > 0 for row in rows),
    )


def _metrics(evaluation: Input) -> dict[str, Any]:
    """Return the metrics without those that are computed here, also for evaluations older than these metrics, and
    without the count of rows.
    """
    return {name: v for name, v in evaluation.manifest.metrics.items() if name not in ("blank_share", "rows_read")}


def _uniformity(rows: Sequence[Mapping[str, Any]]) -> str:
    greedy, *sampled = zip(*([c["text"] for c in row["completions"]] for row in rows), strict=True)
    return uniformity(greedy, [text for texts in sampled for text in texts])


def _edges(nodes: Mapping[str, Input]) -> list[tuple[str, str]]:
    names = {item.manifest.ref.path: name for name, item in nodes.items()}
    return [
        (names[parent.path], name)
        for name, item in nodes.items()
        for parent in item.manifest.parents.values()
        if parent.path in names
    ]


def curves_of(metrics: Path | bytes) -> Curves:
    """Return the curves of a metrics.jsonl, or of its lines so far; none without the file: few stages log metrics."""
    if isinstance(metrics, Path):
        metrics = metrics.read_bytes() if metrics.exists() else b""
    curves: Curves = {}
    for line in metrics.splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                curves.setdefault(name, []).append((values["step"], value))
    return curves


def _by_prompts(answers: Answers) -> list[Answers]:
    """Group the evaluations by prompts and scorers."""
    comparable: dict[tuple[str, frozenset[str]], dict[str, list[dict[str, Any]]]] = {}
    for model, rows in answers.items():
        asked = json.dumps(sorted(questions(rows).items()), default=str)
        comparable.setdefault((asked, frozenset(scorers_of(rows))), {})[model] = rows
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
        for scorer in scorers_of(answers[before])
    ]


def _difference(
    scorer: str, before: str, after: str, old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> Difference:
    difference = compare(old, new, scorer)
    prompts = sum(scorer in _greedy(row)["scores"] for row in new)
    return Difference(scorer, before, after, difference.value, difference.low, difference.high, prompts)


def _greedy(row: dict[str, Any]) -> dict[str, Any]:
    completion: dict[str, Any] = row["completions"][0]
    return completion


def _sample_rows(answers: Answers) -> list[SampleRow]:
    """Return all prompts with scores in a fixed random order, which is independent of the models' scores."""
    first = [row for row in next(iter(answers.values())) if _greedy(row)["scores"]]
    rows = {model: {row["id"]: row for row in model_rows} for model, model_rows in answers.items()}
    samples = []
    for row in random.Random(0).sample(first, len(first)):
        greedy = {model: _greedy(by_id[row["id"]]) for model, by_id in rows.items()}
        completions = {m: (c["text"], float(next(iter(c["scores"].values())))) for m, c in greedy.items()}
        scores = [score for _, score in completions.values()]
        answer = "" if row.get("answer") is None else str(row["answer"])
        images = tuple(filter(is_image_name, row.get("images", ())))
        samples.append(SampleRow(row["prompt"], answer, completions, scores[-1] - scores[0], images))
    return samples


def _most_changed(rows: Sequence[SampleRow], count: int) -> list[SampleRow]:
    """Return the rows whose score changed most, regressions first, then others.

    Half of them are improvements, as far as there are some, so that many regressions do not hide them.
    """
    worse = sorted((row for row in rows if row.change < 0), key=lambda row: row.change)
    better = sorted((row for row in rows if row.change > 0), key=lambda row: -row.change)
    improved = better[: max(count - len(worse), count // 2)]
    same = [row for row in rows if row.change == 0]
    return [*worse[: count - len(improved)], *improved, *same][:count]
