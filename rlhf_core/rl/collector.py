"""Collection of a step's trajectories: sample and reward prompts until enough groups pass filtering."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.errors import StageError
from rlhf_core.rewards import TrajectoryReward
from rlhf_core.rl.counts import PromptCounts
from rlhf_core.rl.filtering import Group, Tally
from rlhf_core.rl.phases import PhaseTimer
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.rl.replay import Replay
from rlhf_core.rl.rewarding import RewardPipeline, monitor
from rlhf_core.rl.rollouts import RolloutSampler
from rlhf_core.rl.stored import StoredGroups
from rlhf_core.training.checkpointing import DriverState
from rlhf_core.types import Trajectory


class Collector(DriverState, Protocol):
    """Source of each step's trajectories. Its state is saved in checkpoints."""

    def collect(self, step: int, phase: PhaseTimer) -> tuple[list[Trajectory], dict[str, float]]:
        """Return rewarded trajectories, grouped by prompt, and metrics of their collection.

        step: number of updates made and published before. Time is measured as the phases `rollout` and `reward`.
        """

    def trained(self, trajectories: Sequence[Trajectory]) -> None:
        """Count a step that was trained on these trajectories."""

    def proven(self) -> dict[str, float]:
        """Return what became of all prompts as metrics. Raises StageError if that is not what the settings say."""


class SyncCollector:
    """A Collector that samples with the newest weights only.

    Dynamic sampling (section 3.2 of arXiv:2503.14476) if `filtering` is set; else one round without filtering.

    A round draws as many new prompts as groups are missing. The default `oversampling` leaves no surplus; a larger one
    may, and the last round's surplus is dropped: in the next step its completions would be off-policy. So nothing
    remains between steps, and no group is returned twice, but for those of `replay`, which follow the step's own. When
    the prompts of an epoch are exhausted, the step continues with the next epoch and keeps its groups.
    """

    def __init__(
        self,
        config: RLConfig,
        prompts: PromptSampler,
        rollouts: RolloutSampler,
        rewards: RewardPipeline,
        monitors: Mapping[str, TrajectoryReward],
        stored: StoredGroups,
    ) -> None:
        """stored: the form of groups in checkpoints."""
        self._config = config
        self._prompts = prompts
        self._rollouts = rollouts
        self._rewards = rewards
        self._monitors = monitors
        self._replay = Replay(config.replay, config.prompts_per_step, prompts.of_id, stored)
        self.counts = PromptCounts()

    def collect(self, step: int, phase: PhaseTimer) -> tuple[list[Trajectory], dict[str, float]]:
        """See Collector. The metrics cover all sampled trajectories.

        The trajectories are of `prompts_per_step` prompts, or of fewer if `max_rounds` did not suffice and `when_short`
        is train. Raises StageError if no group is kept, or too few and `when_short` is stop; RewardError if a reward
        fails.
        """
        filtering = self._config.settings.filtering
        replayed, replay_metrics = self._replay.take(step)
        wanted = self._config.prompts_per_step - len(replayed)
        tally = Tally()
        kept: list[Group] = []
        for sampling_round in range(filtering.max_rounds if filtering else 1):
            missing = wanted - len(kept)
            count = math.ceil(missing * filtering.oversampling) if filtering else missing
            with phase("rollout"):
                sampled = self._rollouts.sample(self._prompts.draw(count, step), step, sampling_round)
            with phase("reward"):
                groups = [group for group in self._rewards(sampled) if group is not None]
            self._prompts.observe(groups, step)
            passed = tally.sift(groups, filtering) if filtering else groups
            kept += passed
            self.counts.drawn += count
            self.counts.failed += count - len(groups)
            self.counts.filtered += len(groups) - len(passed)
            tally.sampled += [trajectory for group in sampled for trajectory in group]
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
        metrics |= self._prompts.metrics(step) | replay_metrics
        collected = kept[:wanted]
        self.counts.collected += len(collected)
        self.counts.surplus += len(kept) - len(collected)
        self.counts.replayed += len(replayed)
        self._replay.add(collected, step)
        return [trajectory for group in collected + replayed for trajectory in group], metrics

    def trained(self, trajectories: Sequence[Trajectory]) -> None:
        self.counts.steps += 1
        self.counts.trained += len(trajectories) // self._config.settings.group_size

    def proven(self) -> dict[str, float]:
        return self.counts.proven(self._config, cursor=self._prompts.state_dict()["drawn"])

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on: the number of drawn prompts and what decides on the next ones, the
        statistics of the rewards, and groups to replay; and the counts.
        """
        return {
            "prompts": self._prompts.state_dict(), "rewards": self._rewards.state_dict(),
            "counts": self.counts.state_dict(), "replay": self._replay.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._rewards.load_state_dict(state["rewards"])
        self._replay.load_state_dict(state.get("replay", []))
        self.counts = PromptCounts.restored(state)
