"""Documents of the commands that plan, run and follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlhf_core.artifacts.manifest import MetricValue
from rlhf_core.pipeline.estimates import Estimate
from rlhf_core.pipeline.record import NodeRecord


@dataclass(frozen=True, slots=True)
class RecipeLine:
    name: str
    path: Path
    description: str


@dataclass(frozen=True, slots=True)
class Recipes:
    recipes: Sequence[RecipeLine]


@dataclass(frozen=True, slots=True)
class PlannedStage:
    name: str
    artifact: str
    action: str
    why: str
    reads: Sequence[str]
    estimate: Estimate | None


@dataclass(frozen=True, slots=True)
class Plan:
    recipe: str
    stages: Sequence[PlannedStage]
    left_out: Mapping[str, str]
    currency: str | None  # of the estimates' money; None: no prices are set
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class StageOutcome:
    name: str
    artifact: str
    outcome: str
    seconds: float
    metrics: Mapping[str, MetricValue]
    error: str

    @classmethod
    def of(cls, node: NodeRecord) -> StageOutcome:
        return cls(node.name, node.ref.full, node.outcome, node.seconds, node.metrics, node.error)


@dataclass(frozen=True, slots=True)
class RunEnd:
    run: str
    state: str
    succeeded: bool
    message: str
    url: str
    report: Path | None
    stages: Sequence[StageOutcome]


@dataclass(frozen=True, slots=True)
class TriedStage:
    artifact: str
    folder: Path
    metrics: Mapping[str, MetricValue]
    kept_result: datetime | None  # when the result was made that the store keeps instead


@dataclass(frozen=True, slots=True)
class CancelledRun:
    run: str
    state: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """Of `alignment logs`, one object a line."""

    job: str
    stage: str
    process: str  # driver, rank, engine, or the class of another actor
    pid: int | None  # of an actor
    line: str
