"""Win rates: each completion is compared with others of its prompt, or with the row's own, by a judge of pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random
from statistics import fmean
from typing import Any

from rlhf_core.config.rewards.rewards import PairwiseReward
from rlhf_core.config.texts import is_blank
from rlhf_core.contract import StageContext
from rlhf_core.data.sampled import Comparison, Outcome
from rlhf_core.errors import RewardError
from rlhf_core.rewards.base import RewardResult, TextGroup, checked_result, tolerated
from rlhf_core.rewards.judge import JudgeOfPairs

_POINTS: Mapping[Outcome, float] = {"one": 1.0, "other": 0.0, "ties": 0.5, "order_dependent": 0.5}  # of the one


@dataclass(slots=True)
class _Record:
    """The comparisons of a completion."""

    points: list[float] = field(default_factory=list)
    order_dependent: int = 0
    failure: RewardError | None = None

    def add(self, outcome: Outcome | RewardError, *, turned: bool = False) -> None:
        if isinstance(outcome, RewardError):
            self.failure = self.failure or outcome
            return
        self.points.append(1 - _POINTS[outcome] if turned else _POINTS[outcome])
        self.order_dependent += outcome == "order_dependent"

    def value(self) -> dict[str, float] | RewardError:
        if self.failure is not None:
            return self.failure
        return {"reward": fmean(self.points), "order_dependent": self.order_dependent / len(self.points)}


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two completions to compare, and their records; a row's own completion has none."""

    one: _Record
    other: _Record | None
    compared: Comparison


class WinRates:
    """The mean points of a completion's comparisons: 1 for a win, 0.5 for a tie or a verdict that changes with the
    order. Equal completions tie without a call.

    `order_dependent`, the share of such verdicts, measures the judge's position bias.
    """

    @classmethod
    def of(cls, config: PairwiseReward, context: StageContext) -> WinRates:
        return cls(config, 0 if config.opponents is None else context.seed)

    def __init__(self, config: PairwiseReward, seed: int) -> None:
        """Raises RewardError if an environment variable that the config names is not set or not valid."""
        self._config = config
        self._seed = seed
        self._judge = JudgeOfPairs(config)

    def __call__(self, groups: Sequence[TextGroup]) -> RewardResult:
        records: list[_Record] = []
        pairs: list[_Pair] = []
        for group in groups:
            of_group = [_Record() for _ in group.completions]
            records += of_group
            pairs += self._pairs(group, of_group)
        self._judge_all(pairs)
        servers, share = self._judge.judge.servers, self._config.tolerated_failures
        result = checked_result([record.value() for record in records], len(records), servers.name, share)
        metrics = {name: [value] * len(records) for name, value in servers.metrics().items()}
        return replace(result, extra={**result.extra, **metrics})

    def close(self) -> None:
        self._judge.close()

    def _judge_all(self, pairs: Sequence[_Pair]) -> None:
        """Add the outcome of each pair to the records of its completions."""
        different = [pair for pair in pairs if pair.compared.one["text"] != pair.compared.other["text"]]
        outcomes = self._judge.outcomes([pair.compared for pair in different])
        of_pair = {id(pair): outcome for pair, outcome in zip(different, outcomes, strict=True)}
        for pair in pairs:
            outcome = of_pair.get(id(pair), "ties")
            pair.one.add(outcome)
            if pair.other is not None:
                pair.other.add(outcome, turned=True)

    def _pairs(self, group: TextGroup, records: Sequence[_Record]) -> Iterator[_Pair]:
        """Yield the group's pairs. records: of its completions."""
        entries = [{"text": text} for text in group.completions]
        if self._config.reference is not None:
            (reference,) = tolerated(self._config.tolerated_failures, 1, _reference, group.row, self._config.reference)
            for record, entry in zip(records, entries, strict=True):
                if isinstance(reference, RewardError):
                    record.add(reference)
                else:
                    yield _Pair(record, None, Comparison(group.row, entry, {"text": reference}))
            return
        drawn = Random(json.dumps([self._seed, group.row.get("id"), *group.completions]))
        for one, other in opponents(len(entries), self._config.opponents, drawn):
            yield _Pair(records[one], records[other], Comparison(group.row, entries[one], entries[other]))


def opponents(count: int, least: int | None, drawn: Random) -> Iterator[tuple[int, int]]:
    """Yield pairs of `count` completions, in which each has `least` opponents, or one more if `count` is odd.

    least: None: all others. The pairs are the first rounds of a tournament of completions in random order, by the
    circle method: in a round each plays once, but for one of an odd number.
    """
    rounds = count if least is None else least + count % 2
    if rounds >= count - 1 + count % 2:
        yield from combinations(range(count), 2)
        return
    order = drawn.sample(range(count), count)
    seats: list[int | None] = [*order, None] if count % 2 else [*order]
    for _ in range(rounds):
        half = len(seats) // 2
        for one, other in zip(seats[:half], reversed(seats[half:]), strict=True):
            if one is not None and other is not None:
                yield one, other
        seats.insert(1, seats.pop())


def _reference(row: Mapping[str, Any], column: str) -> list[str]:
    text = row.get(column)
    if not isinstance(text, str) or is_blank(text):
        raise RewardError(f"row {row.get('id')}: the column `{column}` has no completion to compare with: {text!r}")
    return [text]
