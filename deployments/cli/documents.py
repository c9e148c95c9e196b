"""The documents that commands print with `--json`. Fields are added to them, and never renamed: programs read them.

Times are ISO 8601 with a zone, durations seconds, sizes bytes; an artifact is named `stage/key` with all its digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.costs import Cost, StageCost, cost_of, total
from rlhf_core.artifacts.manifest import Manifest, MetricValue
from rlhf_core.config.prices import PricesConfig
from rlhf_core.pipeline.estimates import Estimate
from rlhf_core.pipeline.record import NodeRecord, RunRecord
from rlhf_core.pipeline.run_costs import RunCosts, prices_of_run


@dataclass(frozen=True, slots=True)
class Files:
    """Of commands that write files."""

    paths: Sequence[Path]


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    state: str
    problem: str
    works: bool
    pid: int
    uptime: float
    url: str
    log: Path | None


@dataclass(frozen=True, slots=True)
class Port:
    address: str
    port: int
    used_by: str
    protected_by: str


@dataclass(frozen=True, slots=True)
class StackStatus:
    services: Sequence[Service]
    ports: Sequence[Port]


@dataclass(frozen=True, slots=True)
class Environment:
    variables: Mapping[str, str]


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
class AliasLine:
    alias: str
    artifact: str
    previous: str | None
    by: str
    reason: str
    moved: datetime


@dataclass(frozen=True, slots=True)
class Aliases:
    aliases: Sequence[AliasLine]


@dataclass(frozen=True, slots=True)
class MoveLine:
    alias: str
    number: int
    artifact: str
    previous: str | None
    by: str
    reason: str
    moved: datetime
    gate: str | None  # the artifact that passed the model
    approved_by: str
    restores: int | None  # of a rollback: number of the move to whose model it goes back


@dataclass(frozen=True, slots=True)
class ProtectionLine:
    alias: str
    protected: bool
    by: str
    reason: str
    changed: datetime


@dataclass(frozen=True, slots=True)
class RegistryLog:
    waiting: Sequence[AliasLine]  # candidates that wait for a person
    moves: Sequence[MoveLine]
    protections: Sequence[ProtectionLine]


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    metric: str
    value: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Promotion:
    alias: AliasLine | None
    moved: bool
    differences: Sequence[ScoreDifference]


@dataclass(frozen=True, slots=True)
class Rejection:
    model: str
    candidate: str
    gate: str
    by: str
    reason: str
    decided: datetime


@dataclass(frozen=True, slots=True)
class AliasProtection:
    alias: str
    protected: bool
    changed: bool


@dataclass(frozen=True, slots=True)
class ParentLink:
    parent: str
    child: str
    role: str


@dataclass(frozen=True, slots=True)
class Ancestors:
    artifacts: Sequence[Manifest]  # parents before children, the artifact itself last
    edges: Sequence[ParentLink]


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
class RunLine:
    run: str
    recipe: str
    settings: Sequence[str]
    outcome: str  # completed, failed, or of a run without a record its state in Prefect
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
            outcome="completed" if record.succeeded else "failed",
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
    outcome: str  # succeeded, failed or unfinished
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
class RecipeLine:
    name: str
    path: Path
    description: str


@dataclass(frozen=True, slots=True)
class Recipes:
    recipes: Sequence[RecipeLine]


@dataclass(frozen=True, slots=True)
class RoundLine:
    number: int
    verdict: str  # accepted, refused, skipped, running, or unfinished: started by a run that has ended
    reason: str
    candidate: str | None
    started: datetime | None
    ended: datetime | None
    run: str


@dataclass(frozen=True, slots=True)
class LoopRounds:
    loop: str
    rounds: Sequence[RoundLine]
    page: Path | None


@dataclass(frozen=True, slots=True)
class ScheduleLine:
    loop: str
    when: str
    active: bool
    recipe: str
    settings: str
    budget: float | None = None  # of the loop, in the currency of its prices


@dataclass(frozen=True, slots=True)
class Schedules:
    schedules: Sequence[ScheduleLine]


@dataclass(frozen=True, slots=True)
class DamagedObject:
    object: str
    damage: str
    artifacts: Sequence[str]
    repair: str  # empty: nothing was done


@dataclass(frozen=True, slots=True)
class Integrity:
    artifacts: int
    blobs: int
    bytes_read: int
    damaged: Sequence[DamagedObject]
    to_compute_again: Sequence[str]


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
