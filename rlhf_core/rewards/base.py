"""The interface of a reward: one finite number per completion; anything else is a RewardError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.errors import RewardError

if TYPE_CHECKING:
    from rlhf_core.types import Trajectory  # which loads torch; preflight does not


_LARGEST = 3.4028234663852886e38  # float32's


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Every list has one entry per completion, in their order."""

    rewards: list[float]  # for training
    scores: list[float | None]  # 0-1, for filtering and evaluation
    extra: dict[str, list[float]] = field(default_factory=dict)  # logged
    steps: list[list[float]] | None = None  # one reward per step of a completion, added to its own
    separator: str = "\n"  # text that ends a step, where there are rewards of steps


class Reward(Protocol):
    """A reward of text. `of(config, context)`, a class method, makes one from its settings and the stage's context."""

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        """Score `completions[i]`, the answer to `prompts[i]`, which is the text of the dataset row `rows[i]`.

        Raises RewardError that names the index and the problem; never returns a default value.
        """

    def close(self) -> None:
        """Release its resources, such as a child process."""


class TrajectoryReward(Protocol):
    """A reward that may look at tokens: a reward model does, verifiers, functions and servers read text."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult: ...

    def close(self) -> None: ...


def checked_result(values: object, count: int, name: str) -> RewardResult:
    """A RewardResult from what a reward returned: `count` numbers or mappings {reward, score, steps, other metrics}.

    Raises RewardError if it is anything else, a number is not finite, or a score is outside 0-1.
    """
    if not isinstance(values, list | tuple):
        raise RewardError(f"{name} returned {type(values).__name__}, expected a list of {count} numbers")
    if len(values) != count:
        raise RewardError(f"{name} returned {len(values)} values for {count} completions")
    rewards: list[float] = []
    scores: list[float | None] = []
    extra: dict[str, list[float]] = {}
    steps: list[list[float]] = []
    for index, value in enumerate(values):
        fields = value if isinstance(value, Mapping) else {"reward": value}
        where = f"{name}, completion {index}"
        if "reward" not in fields:
            raise RewardError(f"{where}: there is no `reward` in {sorted(map(str, fields))}")
        rewards.append(_finite(fields["reward"], "reward", where))
        scores.append(_score(fields.get("score"), where))
        if "steps" in fields:
            steps.append(_steps(fields["steps"], where))
        if steps and len(steps) != index + 1:
            raise RewardError(f"{where}: some completions have `steps` and some do not")
        metrics = {str(key): fields[key] for key in fields if key not in ("reward", "score", "steps")}
        if index and metrics.keys() != extra.keys():
            raise RewardError(
                f"{where}: has the metrics {sorted(metrics)}, the completions before it have {sorted(extra)}"
            )
        for key, metric in metrics.items():
            extra.setdefault(key, []).append(_finite(metric, key, where))
    return RewardResult(rewards, scores, extra, steps or None)


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
        raise RewardError(f"{where}: the {what} is {value!r}, expected a number")
    if not fits(value):
        raise RewardError(f"{where}: the {what} is {written(value)}, expected a finite number that float32 holds")
    return float(value)


def fits(value: float) -> bool:
    """Whether `value` is finite in float32, in which rewards train."""
    return abs(value) <= _LARGEST


def written(value: float) -> str:
    """`value` in a message: Python refuses to write integers of thousands of digits."""
    return f"{value:g}" if isinstance(value, float) else f"an integer of {value.bit_length()} bits"
