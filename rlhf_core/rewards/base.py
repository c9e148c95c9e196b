"""What a reward is: completions in, one finite number for each out; anything else is a RewardError."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_core.errors import RewardError


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Everything is as long as the completions, in their order."""

    rewards: list[float]  # what trains
    scores: list[float | None]  # 0-1, what filters and evaluates
    extra: dict[str, list[float]] = field(default_factory=dict)  # logged
    steps: list[list[float]] | None = None  # one reward for each step of a completion, beside its own


class Reward(Protocol):
    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        """Judge `completions[i]`, an answer to `prompts[i]`, the text of the dataset row `rows[i]`.

        Raises RewardError that names the index and what is wrong: never a default value.
        """

    def close(self) -> None:
        """Give back what it holds, such as a process of its own."""


def checked_result(values: object, count: int, name: str) -> RewardResult:
    """What a reward returned, `count` numbers or mappings {reward, score, steps, other figures}, as RewardResult.

    Raises RewardError where it is not that, or a number is not finite, or a score is outside 0-1.
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
        figures = value if isinstance(value, Mapping) else {"reward": value}
        where = f"{name}, completion {index}"
        if "reward" not in figures:
            raise RewardError(f"{where}: there is no `reward` in {sorted(map(str, figures))}")
        rewards.append(_finite(figures["reward"], "reward", where))
        scores.append(_score(figures.get("score"), where))
        if "steps" in figures:
            steps.append(_steps(figures["steps"], where))
        if steps and len(steps) != index + 1:
            raise RewardError(f"{where}: some completions have `steps` and some have not")
        others = {str(key): figures[key] for key in figures if key not in ("reward", "score", "steps")}
        if index and others.keys() != extra.keys():
            raise RewardError(f"{where}: gives {sorted(others)} beside the reward, the others give {sorted(extra)}")
        for key, figure in others.items():
            extra.setdefault(key, []).append(_finite(figure, key, where))
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
    if not math.isfinite(value):
        raise RewardError(f"{where}: the {what} is {value}, expected a finite number")
    return float(value)
