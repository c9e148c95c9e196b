"""What a step trains on: prompts are drawn, answered and rewarded, until enough of them have something to teach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rlhf_core.config.rl import RLConfig
from rlhf_core.config.shaping import FilteringConfig
from rlhf_core.errors import StageError
from rlhf_core.rewards import Reward
from rlhf_core.rl.phases import PhaseTimer
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.rewarding import RewardPipeline, monitor
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.types import Trajectory

Group = list[Trajectory]  # the completions of one prompt


class Collector:
    """Dynamic sampling, section 3.2 of arXiv:2503.14476, where `filtering` is set; else one round, all of it kept.

    A round draws as many new prompts as groups are missing. With the default `oversampling` none is ever too many; with
    more, the last round's surplus is dropped: by the next step its completions would be of older weights, and the loop
    is on-policy. So nothing is left over between steps, and no group is returned twice. Where the prompts end, the
    step continues with the next epoch and keeps what it has so far.
    """

    def __init__(
        self,
        config: RLConfig,
        prompts: PromptSampler,
        rollouts: RolloutSampler,
        rewards: RewardPipeline,
        monitors: Mapping[str, Reward],
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._rollouts = rollouts
        self._rewards = rewards
        self._monitors = monitors

    def collect(self, step: int, phase: PhaseTimer) -> tuple[list[Trajectory], dict[str, float]]:
        """Rewarded trajectories, those of one prompt side by side, and metrics of all that was sampled for them.

        They are of `prompts_per_step` prompts, or fewer where `max_rounds` were not enough and `when_short` is train.
        Raises StageError where nothing could be kept, or `when_short` is stop; RewardError where a reward fails.
        """
        wanted, filtering = self._config.prompts_per_step, self._config.settings.filtering
        tally = _Tally()
        kept: list[Group] = []
        for sampling_round in range(filtering.max_rounds if filtering else 1):
            missing = wanted - len(kept)
            count = math.ceil(missing * filtering.oversampling) if filtering else missing
            with phase("rollout"):
                trajectories = self._rollouts.sample(self._prompts.draw(count), step, sampling_round)
            with phase("reward"):
                groups = self._groups(self._rewards(trajectories)) if trajectories else []
            kept += tally.sift(groups, filtering) if filtering else groups
            tally.sampled += trajectories
            if len(kept) >= wanted:
                break
        failures = {**self._rollouts.take_failures(), **self._rewards.take_failures()}
        if not kept and not (filtering and tally.scores):
            raise StageError(
                f"step {step}: of every prompt an episode failed, or did not get its reward ({failures}), so nothing "
                "is left to train on; correct what fails, or lower its `tolerated_failures` to see the first error"
            )
        if filtering and (not kept or (len(kept) < wanted and filtering.when_short == "stop")):
            raise StageError(f"step {step}: {tally.complaint(len(kept), wanted)}")
        with phase("reward"):
            metrics = {**failures, **monitor(tally.sampled, self._monitors)}
        if filtering:
            metrics |= tally.metrics(surplus=max(0, len(kept) - wanted))
        return [trajectory for group in kept[:wanted] for trajectory in group], metrics

    def _groups(self, trajectories: Sequence[Trajectory]) -> list[Group]:
        size = self._config.settings.group_size
        return [list(trajectories[start : start + size]) for start in range(0, len(trajectories), size)]

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: how many prompts were drawn, and the statistics of the rewards."""
        return {"prompts": self._prompts.state_dict(), "rewards": self._rewards.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._rewards.load_state_dict(state["rewards"])


@dataclass
class _Tally:
    """What one step sampled, and how its groups fared."""

    sampled: list[Trajectory] = field(default_factory=list)
    rounds: int = 0
    scores: list[float] = field(default_factory=list)  # the mean score of each group
    all_wrong: int = 0
    all_right: int = 0

    def sift(self, groups: Sequence[Group], filtering: FilteringConfig) -> list[Group]:
        """The groups whose mean score lies strictly between the bounds."""
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
    assert len(scores) == len(group)  # RewardPipeline refuses what cannot be filtered
    return fmean(scores)
