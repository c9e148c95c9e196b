"""The interface of a reward: one finite number per completion; anything else is a RewardError."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.errors import RewardError

if TYPE_CHECKING:
    from rlhf_core.types import Trajectory  # which loads torch; preflight does not


_LARGEST = 3.4028234663852886e38  # float32's


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The rewards of completions. Every list has one entry per completion, in their order."""

    rewards: list[float]  # for training
    scores: list[float | None]  # 0-1, for filtering and evaluation
    extra: dict[str, list[float]] = field(default_factory=dict)  # logged
    steps: list[list[float]] | None = None  # one reward per step of a completion, added to its own
    separator: str = "\n"  # text that ends a step, where there are rewards of steps
    failures: dict[int, str] = field(
        default_factory=dict
    )  # completion -> why it has no reward, where that is tolerated
    inapplicable: frozenset[int] = frozenset()  # completions that the reward says nothing of; theirs is 0

    def totals(self) -> list[float]:
        """Total reward of each completion, including those of its steps. Raises RewardError if one has none."""
        self.require_applicable()
        steps = self.steps or [[]] * len(self.rewards)
        return [math.fsum([reward, *of_steps]) for reward, of_steps in zip(self.rewards, steps, strict=True)]

    def require_applicable(self) -> None:
        """Raise RewardError unless the reward applies to each completion."""
        if self.inapplicable:
            raise RewardError(
                f"completion {min(self.inapplicable)}: the reward is None, which means that it does not apply: here "
                "each completion needs one"
            )

    def of(self, indexes: Sequence[int]) -> RewardResult:
        """Select completions, none of which has failed."""
        return RewardResult(
            [self.rewards[index] for index in indexes],
            [self.scores[index] for index in indexes],
            {name: [values[index] for index in indexes] for name, values in self.extra.items()},
            None if self.steps is None else [self.steps[index] for index in indexes],
            self.separator,
            inapplicable=frozenset(new for new, index in enumerate(indexes) if index in self.inapplicable),
        )


class Reward(Protocol):
    """A reward of text. `of(config, context)`, a class method, makes one from its settings and the stage's context."""

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        """Score `completions[i]`, the reply to `prompts[i]`, the text of the dataset row `rows[i]`.

        Raises RewardError that names the index and the problem; never returns a default value.
        """

    def close(self) -> None:
        """Release its resources, such as a child process."""


@dataclass(frozen=True, slots=True)
class TextGroup:
    """The completions of one prompt, the text of the dataset row `row`."""

    completions: Sequence[str]
    prompt: str
    row: Mapping[str, Any]


class GroupReward(Protocol):
    """A reward of text that sees all completions of a prompt together. It is made as a Reward is."""

    def __call__(self, groups: Sequence[TextGroup]) -> RewardResult:
        """Score the completions of all groups, one after the other. Raises RewardError as a Reward does."""

    def close(self) -> None:
        """Release its resources."""


class TrajectoryReward(Protocol):
    """A reward of tokens: reward models read these; verifiers, functions and servers read text."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult: ...

    def close(self) -> None: ...


def tolerated(share: float, count: int, judge: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
    """Return `judge(*arguments)`, the values of `count` completions.

    If failures are tolerated, its RewardError is returned for each of them.
    """
    try:
        return judge(*arguments)
    except RewardError as error:
        if not share:
            raise
        return [error] * count


def without_repeated(values: list[Any]) -> list[Any]:
    """Remove scores from `values` if they repeat the rewards, and are not all from 0 to 1."""
    scored = [value for value in values if isinstance(value, dict) and "score" in value]
    repeated = all(value["score"] == value["reward"] for value in scored)
    if not repeated or all(isinstance(v["score"], int | float) and 0 <= v["score"] <= 1 for v in scored):
        return values
    return [
        {name: item for name, item in value.items() if name != "score"} if isinstance(value, dict) else value
        for value in values
    ]


def checked_result(
    values: object, count: int, name: str, tolerated_failures: float = 0.0, *, may_not_apply: bool = False
) -> RewardResult:
    """Validate a reward's return value: `count` numbers or mappings {reward, score, steps, other metrics}.

    may_not_apply: a reward may be None for a completion that it does not apply to.

    Raises RewardError if it is anything else, a number is not finite, or a score is outside 0-1. Up to the share
    `tolerated_failures` of the completions may be invalid, or have a RewardError in place of their value.
    """
    if not isinstance(values, list | tuple):
        raise RewardError(f"{name} returned {type(values).__name__}, expected a list of {count} numbers")
    if len(values) != count:
        raise RewardError(f"{name} returned {len(values)} values for {count} completions")
    judged: dict[int, _Judged] = {}
    failures: dict[int, str] = {}
    inapplicable: frozenset[int] = frozenset()
    if may_not_apply:
        given = [value if isinstance(value, Mapping) else {"reward": value} for value in values]
        inapplicable = frozenset(index for index, each in enumerate(given) if each.get("reward", 0) is None)
        values = [{**each, "reward": 0.0} if i in inapplicable else values[i] for i, each in enumerate(given)]
    for index, value in enumerate(values):
        try:
            judged[index] = _judged(value, f"{name}, completion {index}")
        except RewardError as error:
            if not tolerated_failures:
                raise
            failures[index] = str(error)
    if len(failures) > tolerated_failures * count:
        raise RewardError(_too_many(name, failures, count, tolerated_failures))
    return replace(_aligned(judged, failures, count, name), inapplicable=inapplicable)


@dataclass(frozen=True, slots=True)
class _Judged:
    reward: float
    score: float | None
    steps: list[float] | None
    metrics: dict[str, float]


def _judged(value: object, where: str) -> _Judged:
    if isinstance(value, RewardError):
        raise value
    fields = value if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in fields:
        raise RewardError(f"{where}: there is no `reward` in {sorted(map(str, fields))}")
    return _Judged(
        _finite(fields["reward"], "reward", where),
        _score(fields.get("score"), where),
        _steps(fields["steps"], where) if "steps" in fields else None,
        {str(key): _finite(fields[key], key, where) for key in fields if key not in ("reward", "score", "steps")},
    )


def _aligned(judged: Mapping[int, _Judged], failures: dict[int, str], count: int, name: str) -> RewardResult:
    """Raise RewardError if completions have other metrics than the first, or only some have steps."""
    first = next(iter(judged.values()), _Judged(math.nan, None, None, {}))
    for index, one in judged.items():
        where = f"{name}, completion {index}"
        if (one.steps is None) != (first.steps is None):
            raise RewardError(f"{where}: some completions have `steps` and some do not")
        if one.metrics.keys() != first.metrics.keys():
            raise RewardError(
                f"{where}: has the metrics {sorted(one.metrics)}, the completions before it have "
                f"{sorted(first.metrics)}"
            )
    missing = _Judged(math.nan, None, [], dict.fromkeys(first.metrics, math.nan))
    each = [judged.get(index, missing) for index in range(count)]
    return RewardResult(
        [one.reward for one in each],
        [one.score for one in each],
        {key: [one.metrics[key] for one in each] for key in first.metrics},
        None if first.steps is None else [one.steps or [] for one in each],
        failures=failures,
    )


def _too_many(name: str, failures: Mapping[int, str], count: int, share: float) -> str:
    shown = "; ".join(list(dict.fromkeys(failures.values()))[:3])
    return (
        f"{name} failed for {len(failures)} of {count} completions, more than its `tolerated_failures` of {share:g}; "
        f"the first: {shown}"
    )


def _steps(value: object, where: str) -> list[float]:
    if not isinstance(value, list | tuple):
        raise RewardError(f"{where}: `steps` is {value!r}, expected a list with a number for each step")
    return [_finite(step, f"reward of step {index}", where) for index, step in enumerate(value)]


def _score(value: object, where: str) -> float | None:
    if value is None:
        return None
    score = _finite(value, "score", where)
    if not 0 <= score <= 1:
        raise RewardError(f"{where}: the score is {score}, expected 0 to 1")
    return score


def _finite(value: object, what: str, where: str) -> float:
    if not isinstance(value, int | float):
        raise RewardError(f"{where}: the {what} is {reprlib.repr(value)}, expected a number")
    if not fits(value):
        raise RewardError(f"{where}: the {what} is {written(value)}, expected a finite number that float32 holds")
    return float(value)


def fits(value: float) -> bool:
    """Return whether `value` is finite in float32, the type of rewards in training."""
    return abs(value) <= _LARGEST


def written(value: float) -> str:
    """Format `value` for a message: Python refuses to format integers of thousands of digits."""
    return f"{value:g}" if isinstance(value, float) else f"an integer of {value.bit_length()} bits"
