"""Use of hardware and judges by attempts, and its cost at given prices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.config.prices import PricesConfig

Part = Literal["own", "others", "saved"]

_HOUR = 3600.0
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """seconds: with a reservation; joules: as far as machines told, by kind of device."""

    seconds: float = 0.0
    device_seconds: float = 0.0
    gpu_seconds: float = 0.0
    core_seconds: float = 0.0
    gib_seconds: float = 0.0
    joules: dict[str, float] = field(default_factory=dict)
    judge_calls: int = 0
    judge_tokens: int = 0
    money: float = 0.0  # of what has a price
    unpriced: frozenset[str] = frozenset()  # what has none

    def __add__(self, other: Cost) -> Cost:
        kinds = self.joules.keys() | other.joules.keys()
        return Cost(
            self.seconds + other.seconds,
            self.device_seconds + other.device_seconds,
            self.gpu_seconds + other.gpu_seconds,
            self.core_seconds + other.core_seconds,
            self.gib_seconds + other.gib_seconds,
            {kind: self.joules.get(kind, 0.0) + other.joules.get(kind, 0.0) for kind in sorted(kinds)},
            self.judge_calls + other.judge_calls,
            self.judge_tokens + other.judge_tokens,
            self.money + other.money,
            self.unpriced | other.unpriced,
        )


def cost_of(attempts: Iterable[Attempt], prices: PricesConfig | None) -> Cost:
    """Return the sum over attempts; without prices its money is 0."""
    return sum((_cost(attempt, prices) for attempt in attempts), Cost())


def _cost(attempt: Attempt, prices: PricesConfig | None) -> Cost:
    judges = attempt.judges.values()
    charged = [] if prices is None else list(_charged(attempt, prices))
    return Cost(
        seconds=attempt.seconds,
        device_seconds=attempt.device_seconds,
        gpu_seconds=attempt.gpus * attempt.seconds,
        core_seconds=attempt.core_seconds,
        gib_seconds=attempt.gib_seconds,
        joules=dict(attempt.energy),
        judge_calls=sum(use.calls for use in judges),
        judge_tokens=sum(use.prompt_tokens + use.completion_tokens for use in judges),
        money=sum(each for each in charged if isinstance(each, float)),
        unpriced=frozenset(each for each in charged if isinstance(each, str)),
    )


def _charged(attempt: Attempt, prices: PricesConfig) -> Iterator[float | str]:
    """Yield amounts of money, and what has no price."""
    yield reserved_money(attempt.device, attempt.gpus, attempt.cores, attempt.seconds, prices)
    yield attempt.gib_seconds / _HOUR * (prices.gib or 0.0)
    if attempt.gpus and prices.gpu(attempt.device) is None:
        yield f"the GPU {attempt.device}"
    for model, use in attempt.judges.items():
        price = prices.judge(model)
        if price is None:
            yield f"the judge {model}"
            continue
        yield (use.prompt_tokens * price.input + use.completion_tokens * price.output) / _MILLION
        if use.unreported:
            yield f"{use.unreported} replies of the judge {model}, whose tokens its server did not report"


def reserved_money(device: str, gpus: float, cores: float, seconds: float, prices: PricesConfig) -> float:
    """Return the price of GPUs and cores for so many seconds; a GPU that the table has no price of is 0."""
    an_hour = gpus * (prices.gpu(device) or 0.0) + cores * (prices.core or 0.0)
    return an_hour * seconds / _HOUR


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage in a run: its own attempts, those of other runs, and what reuse saved."""

    name: str
    outcome: str
    attempts: tuple[Attempt, ...]
    own: Cost = Cost()
    others: Cost = Cost()  # attempts of other runs at what this run computed or could not
    saved: Cost = Cost()

    @property
    def is_known(self) -> bool:
        """Return whether its attempts are known: records of the first releases have none."""
        return self.outcome != "computed" or bool(self.attempts)


def stage_cost(
    name: str, outcome: str, attempts: Iterable[Attempt], run_id: str, prices: PricesConfig | None
) -> StageCost:
    """Return the cost of a stage for the run `run_id`."""
    all_attempts = tuple(attempts)
    own = [attempt for attempt in all_attempts if attempt.run_id == run_id]
    others = cost_of([attempt for attempt in all_attempts if attempt.run_id != run_id], prices)
    reused = outcome == "reused"
    return StageCost(
        name, outcome, all_attempts, cost_of(own, prices), Cost() if reused else others, others if reused else Cost()
    )


def total(costs: Iterable[StageCost], part: Part) -> Cost:
    return sum((getattr(cost, part) for cost in costs), Cost())
