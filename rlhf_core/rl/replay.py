"""Replay of groups with mixed outcomes: trained on once more, with the log-probs of the engine that sampled them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlhf_core.config.rl.difficulty import ReplayConfig
from rlhf_core.errors import StageError
from rlhf_core.rl.filtering import Group
from rlhf_core.rl.stored import StoredGroups
from rlhf_core.types import Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class _Kept:
    step: int  # that sampled it
    group: Group


class Replay:
    """A bounded buffer of groups, each of which is taken once at most. Its state is part of a checkpoint."""

    def __init__(
        self,
        config: ReplayConfig | None,
        prompts_per_step: int,
        prompt_of: Callable[[str], Prompt],
        stored: StoredGroups,
    ) -> None:
        """config: None: nothing is replayed. prompt_of: returns the prompt with an id."""
        self._most, self._max_age = 0, 0  # groups of a step, and steps
        if config is not None:
            self._most, self._max_age = int(config.share * prompts_per_step), config.max_age
        self._prompt_of, self._stored = prompt_of, stored
        self._kept: list[_Kept] = []  # newest first

    def take(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """Return the newest groups for `step`, none older than `max_age`, and metrics. They are not returned again."""
        if not self._most:
            return [], {}
        self._kept = [kept for kept in self._kept if step - kept.step <= self._max_age]
        taken, self._kept = self._kept[: self._most], self._kept[self._most :]
        metrics = {"replay/prompts": float(len(taken))}
        if taken:
            metrics["replay/age"] = fmean(step - kept.step for kept in taken)
        return [kept.group for kept in taken], metrics

    def add(self, groups: Sequence[Group], step: int) -> None:
        """Keep the groups of `step` that have different scores, as many as later steps can take.

        Raises StageError for a completion without a score.
        """
        if self._most:
            mixed = [_Kept(step, group) for group in groups if len(set(map(_score, group))) > 1]
            self._kept = (mixed + self._kept)[: self._most * self._max_age]

    def state_dict(self) -> list[Any]:
        groups = self._stored.save([kept.group for kept in self._kept])
        return [[kept.step, kept.group[0].prompt.id, group] for kept, group in zip(self._kept, groups, strict=True)]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        groups = self._stored.load([(self._prompt_of(prompt), group) for _, prompt, group in state])
        self._kept = [_Kept(step, group) for (step, *_), group in zip(state, groups, strict=True)]


def _score(trajectory: Trajectory) -> float:
    if trajectory.score is None:
        raise StageError("replay: the reward gave a completion no score, by which mixed groups are found")
    return trajectory.score
