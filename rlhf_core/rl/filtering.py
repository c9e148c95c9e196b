"""Dynamic filtering of groups by their mean score, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rlhf_core.config.rl.shaping import FilteringConfig
from rlhf_core.types import Trajectory

Group = list[Trajectory]  # the completions of one prompt


@dataclass
class Tally:
    """The samples of one step, and the outcomes of its groups."""

    sampled: list[Trajectory] = field(default_factory=list)
    rounds: int = 0
    scores: list[float] = field(default_factory=list)  # the mean score of each group
    all_wrong: int = 0
    all_right: int = 0

    def sift(self, groups: Sequence[Group], filtering: FilteringConfig) -> list[Group]:
        """Return the groups whose mean score is strictly between the bounds, and count all of them."""
        self.rounds += 1
        kept = []
        for group in groups:
            score = _mean_score(group)
            self.scores.append(score)
            self.all_wrong += score <= filtering.low
            self.all_right += score >= filtering.high
            if filtering.low < score < filtering.high:
                kept.append(group)
        return kept

    def metrics(self, surplus: int) -> dict[str, float]:
        sampled = len(self.scores)
        return {
            "filtering/rounds": self.rounds,
            "filtering/groups": sampled,
            "filtering/kept_share": 1 - (self.all_wrong + self.all_right) / sampled,
            "filtering/all_wrong_share": self.all_wrong / sampled,
            "filtering/all_right_share": self.all_right / sampled,
            "filtering/surplus": surplus,
            "filtering/score": fmean(self.scores),
        }

    def complaint(self, kept: int, wanted: int) -> str:
        sampled = len(self.scores)
        return (
            f"dynamic filtering kept {kept} of the {wanted} prompts that a step needs, in {self.rounds} rounds of "
            f"sampling: of {sampled} prompts {self.all_wrong / sampled:.0%} were answered all wrong, "
            f"{self.all_right / sampled:.0%} all right; choose prompts that this model answers right at times"
        )


def _mean_score(group: Group) -> float:
    scores = [t.score for t in group if t.score is not None]
    assert len(scores) == len(group)  # RewardPipeline raises if a score is missing
    return fmean(scores)
