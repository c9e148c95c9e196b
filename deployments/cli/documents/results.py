"""Documents of the commands that show runs, their cost and their artifacts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.costs import Cost, StageCost, cost_of, total
from rlhf_core.artifacts.manifest import Manifest, MetricValue
from rlhf_core.config.prices import PricesConfig
from rlhf_core.pipeline.record import RunRecord
from rlhf_core.pipeline.run_costs import RunCosts, prices_of_run


@dataclass(frozen=True, slots=True)
class RunLine:
    run: str
    recipe: str
    settings: Sequence[str]
    outcome: str  # completed, failed, cancelled, or of a run without a record its state in Prefect
    started: datetime | None
    seconds: float | None
    failed_stages: Sequence[str]
    tags: Sequence[str] = ()
    device_seconds: float | None = None  # of its own attempts; None: it has no record
    money: float | None = None  # of what has a price; None: no prices are set, or it has no record
    currency: str | None = None

    @classmethod
    def of(cls, record: RunRecord) -> RunLine:
        prices = prices_of_run(record.recipe)
        cost = total(record.costs(prices), "own")
        return cls(
            run=record.run_id,
            recipe=str(record.recipe.get("name", "")),
            settings=record.overrides,
            outcome="cancelled" if record.stopped else "completed" if record.succeeded else "failed",
            started=record.started_at,
            seconds=(record.finished_at - record.started_at).total_seconds(),
            failed_stages=[node.name for node in record.nodes if node.outcome == "failed"],
            tags=record.tags,
            device_seconds=cost.device_seconds,
            money=None if prices is None else cost.money,
            currency=None if prices is None else prices.currency,
        )


@dataclass(frozen=True, slots=True)
class Runs:
    runs: Sequence[RunLine]


@dataclass(frozen=True, slots=True)
class BrowsedStage:
    name: str
    artifact: str
    state: str  # reused, computed, failed or not run; before the run has ended done, running or waiting
    seconds: float | None  # that its result took; None: it has none
    metrics: Mapping[str, MetricValue]
    error: str
    holder: str  # the process that computes it now


@dataclass(frozen=True, slots=True)
class BrowsedRun:
    run: str
    recipe: str
    settings: Sequence[str]
    outcome: str  # succeeded, failed, stopped or unfinished
    started: datetime
    seconds: float | None
    stages: Sequence[BrowsedStage]


@dataclass(frozen=True, slots=True)
class CostLine:
    seconds: float
    device_seconds: float
    gpu_seconds: float
    core_seconds: float
    gib_seconds: float
    joules: Mapping[str, float]
    judge_calls: int
    judge_tokens: int
    money: float | None  # of what has a price; None: no prices are set
    unpriced: Sequence[str]

    @classmethod
    def of(cls, cost: Cost, prices: PricesConfig | None) -> CostLine:
        return cls(
            cost.seconds, cost.device_seconds, cost.gpu_seconds, cost.core_seconds, cost.gib_seconds, cost.joules,
            cost.judge_calls, cost.judge_tokens, None if prices is None else cost.money, sorted(cost.unpriced),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttemptLine:
    attempt: Attempt
    cost: CostLine


@dataclass(frozen=True, slots=True)
class StageCostLine:
    name: str
    outcome: str
    own: CostLine  # of this run's attempts
    others: CostLine  # of attempts of other runs
    saved: CostLine  # by reuse
    attempts: Sequence[AttemptLine]

    @classmethod
    def of(cls, stage: StageCost, prices: PricesConfig | None) -> StageCostLine:
        own, others, saved = (CostLine.of(part, prices) for part in (stage.own, stage.others, stage.saved))
        attempts = [AttemptLine(each, CostLine.of(cost_of([each], prices), prices)) for each in stage.attempts]
        return cls(stage.name, stage.outcome, own, others, saved, attempts)


@dataclass(frozen=True, slots=True)
class RunCost:
    run: str
    recipe: str
    currency: str | None
    own: CostLine
    others: CostLine
    saved: CostLine
    stages: Sequence[StageCostLine]

    @classmethod
    def of(cls, run: str, costs: RunCosts) -> RunCost:
        prices, stages = costs.prices, costs.stages
        return cls(
            run,
            costs.recipe,
            None if prices is None else prices.currency,
            CostLine.of(total(stages, "own"), prices),
            CostLine.of(total(stages, "others"), prices),
            CostLine.of(total(stages, "saved"), prices),
            [StageCostLine.of(stage, prices) for stage in stages],
        )


@dataclass(frozen=True, slots=True)
class ArtifactLine:
    artifact: str
    name: str
    kind: str
    recipe: str
    made: datetime
    size: int
    metrics: Mapping[str, MetricValue]

    @classmethod
    def of(cls, m: Manifest) -> ArtifactLine:
        size = sum(file.size for file in m.files)
        return cls(m.ref.full, m.name, m.kind, m.recipe, m.finished_at, size, m.metrics)


@dataclass(frozen=True, slots=True)
class Artifacts:
    artifacts: Sequence[ArtifactLine]


@dataclass(frozen=True, slots=True)
class Pulled:
    artifact: str
    folder: Path


@dataclass(frozen=True, slots=True)
class ParentLink:
    parent: str
    child: str
    role: str


@dataclass(frozen=True, slots=True)
class Ancestors:
    artifacts: Sequence[Manifest]  # parents before children, the artifact itself last
    edges: Sequence[ParentLink]
