"""Differences between runs, side by side: the content of `alignment diff` and of its page, without any drawing.

The first run is the one that the others are compared with. Lists with one entry per run have the order of the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from rlhf_core.artifacts.costs import StageCost, total
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest, MetricValue
from rlhf_core.config.flat import flattened
from rlhf_core.config.prices import PricesConfig
from rlhf_core.config.stages.evaluation import Completions
from rlhf_core.evaluation.comparison import compare, questions, scorers_of
from rlhf_core.report.formatting import amount, energy, hours

Rows = Sequence[Mapping[str, Any]]  # of an evaluation's samples.jsonl
Section = Literal["settings", "inputs", "code", "libraries"]


@dataclass(frozen=True, slots=True)
class RunStage:
    ref: ArtifactRef
    outcome: str
    manifest: Manifest | None  # None: it has no result, or the store no longer has it


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run as it is compared."""

    run: str  # its id
    recipe: Mapping[str, Any]  # resolved
    overrides: Sequence[str]
    started_at: datetime
    finished_at: datetime
    stages: Mapping[str, RunStage]
    rows: Mapping[str, Rows]  # of its evaluations, by node
    costs: Sequence[StageCost] = ()
    prices: PricesConfig | None = None


@dataclass(frozen=True, slots=True)
class RunHead:
    run: str
    recipe: str
    settings: Sequence[str]  # that were given on the command line
    started: datetime
    seconds: float
    device_seconds: float  # that its results took, whichever run computed them
    gpu_seconds: float | None = None  # reserved by its own attempts, as the next two; None: not all are known
    core_seconds: float | None = None
    joules: Mapping[str, float] | None = None
    money: float | None = (
        None  # of its own attempts, as far as they have a price; None: no prices are set, or not known
    )
    saved_money: float | None = None  # that results of other runs saved it
    currency: str | None = None


@dataclass(frozen=True, slots=True)
class FieldDifference:
    section: Section
    field: str
    values: Sequence[Any]  # one per run; None: it has no such field


@dataclass(frozen=True, slots=True)
class MetricRow:
    stage: str
    metric: str
    values: Sequence[MetricValue]


@dataclass(frozen=True, slots=True)
class StageTimes:
    stage: str
    outcomes: Sequence[str | None]
    seconds: Sequence[float | None]  # that computing its result took, also where it was reused
    device_seconds: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean score of `run` minus that of the first run on the same prompts, with its 95 % interval."""

    run: str
    scorer: str
    completions: Completions
    value: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True, slots=True)
class SampleChange:
    """A prompt whose greedy completion is scored otherwise than the first run's."""

    run: str
    scorer: str
    id: str
    prompt: str
    answer: Any
    before: str
    after: str
    score_before: float
    score_after: float


@dataclass(frozen=True, slots=True)
class EvaluationDiff:
    stage: str
    metrics: Sequence[MetricRow]
    not_paired: Mapping[str, str]  # run -> why it cannot be paired with the first one
    differences: Sequence[PairedDifference]
    worse: Sequence[SampleChange]  # the largest changes first
    better: Sequence[SampleChange]


@dataclass(frozen=True, slots=True)
class RunDiff:
    runs: Sequence[RunHead]
    differences: Sequence[FieldDifference]
    evaluations: Sequence[EvaluationDiff]
    metrics: Sequence[MetricRow]  # of all other stages
    times: Sequence[StageTimes]


def diff_runs(runs: Sequence[ComparedRun], *, samples: int | None) -> RunDiff:
    """Compare the runs. samples: how many prompts are kept whose scores changed most, for the worse and the better;
    None: all.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.stages))
    evaluated = [name for name in names if any(name in run.rows for run in runs)]
    return RunDiff(
        runs=[_head(run) for run in runs],
        differences=[
            FieldDifference(section, field, values)
            for section, fields in _fields(runs).items()
            for field, values in _side_by_side(fields)
            if any(value != values[0] for value in values)
        ],
        evaluations=[_evaluation(name, runs, samples) for name in evaluated],
        metrics=[row for name in names if name not in evaluated for row in _metrics(name, runs)],
        times=[_times(name, runs) for name in names],
    )


def own_costs(runs: Sequence[RunHead]) -> list[tuple[str, list[str]]]:
    """Return the rows of a table of what each run took itself: their names, and a text for each run."""
    rows = [
        ("GPU hours", ["" if run.gpu_seconds is None else hours(run.gpu_seconds) for run in runs]),
        ("core hours", ["" if run.core_seconds is None else hours(run.core_seconds) for run in runs]),
        ("energy", [energy(run.joules or {}) for run in runs]),
        ("cost", ["" if run.money is None else f"{amount(run.money)} {run.currency}" for run in runs]),
        (
            "saved by reuse",
            ["" if not run.saved_money else f"{amount(run.saved_money)} {run.currency}" for run in runs],
        ),
    ]
    return [(name, texts) for name, texts in rows if any(texts)]


def settings_that_differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the settings of two resolved recipes that differ: path, value before and after; None where it has none."""
    pairs = _side_by_side([dict(flattened(before)), dict(flattened(after))])
    return [(field, old, new) for field, (old, new) in pairs if old != new]


def _head(run: ComparedRun) -> RunHead:
    seconds = (run.finished_at - run.started_at).total_seconds()
    device_seconds = sum(manifest.device_seconds for manifest in _manifests(run).values())
    head = RunHead(run.run, str(run.recipe.get("name", "")), run.overrides, run.started_at, seconds, device_seconds)
    if not run.costs or not all(cost.is_known for cost in run.costs):
        return head
    own, saved = total(run.costs, "own"), total(run.costs, "saved")
    head = replace(head, gpu_seconds=own.gpu_seconds, core_seconds=own.core_seconds, joules=own.joules)
    if run.prices is None:
        return head
    return replace(head, money=own.money, saved_money=saved.money, currency=run.prices.currency)


def _manifests(run: ComparedRun) -> dict[str, Manifest]:
    return {name: stage.manifest for name, stage in run.stages.items() if stage.manifest is not None}


def _fields(runs: Sequence[ComparedRun]) -> dict[Section, list[dict[str, Any]]]:
    manifests = [_manifests(run) for run in runs]
    return {
        "settings": [dict(flattened(run.recipe)) for run in runs],
        "inputs": [_inputs(each) for each in manifests],
        "code": [{"revision": _joined(m.code_revision for m in each.values())} for each in manifests],
        "libraries": [_libraries(each.values()) for each in manifests],
    }


def _side_by_side(fields: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    for name in dict.fromkeys(name for each in fields for name in each):
        yield name, [each.get(name) for each in fields]


def _inputs(manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """Return the user's files, the remote sources, and the artifacts that another recipe made, by name."""
    inputs: dict[str, str] = {}
    for name, manifest in manifests.items():
        inputs |= {f"file {path}": sha256 for path, sha256 in manifest.user_files.items()}
        inputs |= {f"source {url}": identity for url, identity in manifest.pins.items()}
        if manifest.name != name:
            inputs[f"artifact {name}"] = manifest.ref.full
    return inputs


def _libraries(manifests: Iterable[Manifest]) -> dict[str, str]:
    versions: dict[str, list[str]] = {}
    for manifest in manifests:
        for library, version in manifest.libraries.items():
            versions.setdefault(library, []).append(version)
    return {library: _joined(each) for library, each in sorted(versions.items())}


def _joined(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _metrics(name: str, runs: Sequence[ComparedRun]) -> list[MetricRow]:
    metrics = [
        stage.manifest.metrics if (stage := run.stages.get(name)) is not None and stage.manifest is not None else {}
        for run in runs
    ]
    return [MetricRow(name, metric, values) for metric, values in _side_by_side(metrics)]


def _times(name: str, runs: Sequence[ComparedRun]) -> StageTimes:
    stages = [run.stages.get(name) for run in runs]
    manifests = [None if stage is None else stage.manifest for stage in stages]
    return StageTimes(
        name,
        [None if stage is None else stage.outcome for stage in stages],
        [None if m is None else (m.finished_at - m.started_at).total_seconds() for m in manifests],
        [None if m is None else m.device_seconds for m in manifests],
    )


def _evaluation(name: str, runs: Sequence[ComparedRun], samples: int | None) -> EvaluationDiff:
    first, *others = runs
    not_paired: dict[str, str] = {}
    differences: list[PairedDifference] = []
    changes: list[SampleChange] = []
    for run in others:
        if problem := _why_not_paired(name, first, run):
            not_paired[run.run] = problem
        else:
            differences += _differences(run.run, first.rows[name], run.rows[name])
            changes += _changes(run.run, first.rows[name], run.rows[name])
    changes.sort(key=lambda change: change.score_after - change.score_before)
    worse = [change for change in changes if change.score_after < change.score_before]
    better = [change for change in reversed(changes) if change.score_after > change.score_before]
    return EvaluationDiff(name, _metrics(name, runs), not_paired, differences, worse[:samples], better[:samples])


def _why_not_paired(name: str, first: ComparedRun, run: ComparedRun) -> str:
    """Return why the evaluations of two runs are not of the same prompts by the same scorers; empty if they are."""
    missing = next((each for each in (first, run) if not each.rows.get(name)), None)
    if missing is not None:
        return f"the run {missing.run} has no such evaluation"
    if questions(first.rows[name]) != questions(run.rows[name]):
        return "other prompts"
    before, after = _manifests(first)[name], _manifests(run)[name]
    others = scorers_of(first.rows[name]) != scorers_of(run.rows[name])
    if before.config.get("scorers") != after.config.get("scorers") or others:
        return "other scorers"
    if before.user_files != after.user_files:
        return "the files of its scorers changed"
    return ""


def _differences(run: str, before: Rows, after: Rows) -> Iterator[PairedDifference]:
    sampled = all(len(rows[0]["completions"]) > 1 for rows in (before, after))
    kinds: tuple[Completions, ...] = ("greedy", "sampled") if sampled else ("greedy",)
    for completions in kinds:
        for scorer in scorers_of(before):
            estimate = compare(before, after, scorer, completions)
            prompts = sum(scorer in row["completions"][0]["scores"] for row in before)
            yield PairedDifference(run, scorer, completions, estimate.value, estimate.low, estimate.high, prompts)


def _changes(run: str, before: Rows, after: Rows) -> Iterator[SampleChange]:
    new = {row["id"]: row for row in after}
    for row in before:
        old_completion, new_completion = row["completions"][0], new[row["id"]]["completions"][0]
        scorer = next(iter(old_completion["scores"]), None)  # the main one
        if scorer is None:
            continue
        yield SampleChange(
            run, scorer, str(row["id"]), row["prompt"], row.get("answer"),
            old_completion["text"], new_completion["text"],
            float(old_completion["scores"][scorer]), float(new_completion["scores"][scorer]),
        )  # fmt: skip


def is_evaluation(stage: RunStage) -> bool:
    return stage.manifest is not None and stage.manifest.kind == Kind.EVALUATION
