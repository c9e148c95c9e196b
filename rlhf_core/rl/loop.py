"""The RL loop. Each step: rollout → reward → score → advantage → update → publish, verifying the served weights.

Synchronous and on-policy: every step samples with the weights that the last step published. With `asynchronous`,
rollouts are sampled while earlier steps train (async_collector.py).

Read next, in the order of a step: prompts → rollouts → episodes/rollouter → rewarding → filtering → collector →
experience → ranks → scoring → algorithms/base → worker → publisher → rollout/proof. assembly.py builds the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from rlhf_core.algorithms import Algorithm
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import StageContext
from rlhf_core.metrics import merged
from rlhf_core.models.vision import ImageProcessor
from rlhf_core.rl.collector import Collector
from rlhf_core.rl.experience import pack_hinted, pack_trajectories, require_finite, without_truncated
from rlhf_core.rl.hybrid import Turns
from rlhf_core.rl.keeping import Keeper
from rlhf_core.rl.pass_rates import PassRates
from rlhf_core.rl.phases import PhaseTimer
from rlhf_core.rl.publisher import Publisher
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.rollout_log import RolloutLog
from rlhf_core.rl.validation import Validation
from rlhf_core.training.checkpointing import Checkpointing
from rlhf_core.types import Rollouts, Trajectory


@dataclass(frozen=True)
class Loop:
    config: RLConfig
    algorithm: Algorithm
    collector: Collector
    trainer: PolicyTrainer
    publisher: Publisher
    context: StageContext
    checkpoints: Checkpointing
    turns: Turns
    validation: Validation | None = None
    keeper: Keeper | None = None
    rollout_log: RolloutLog | None = None
    pass_rates: PassRates | None = None  # of the prompts, if they are selected by these
    processor: ImageProcessor | None = None  # of the policy, if it reads images
    row_counts: Mapping[str, float] = field(default_factory=dict)  # dropped and truncated rows of the datasets

    def run(self) -> dict[str, float]:
        """Run all steps, or those left after the newest checkpoint; return the metrics of the last one, and what became
        of all prompts. Raises StageError if that is not what the settings say.
        """
        self.turns.train(keep_weights=True)
        done = self.checkpoints.resume(self.config.steps)
        self.publisher.start(version=done)
        metrics: dict[str, float] = {}
        for step in range(done, self.config.steps):
            metrics = self._step(step)
            self.context.log(step, metrics)
            self.context.progress(
                step + 1, self.config.steps, "rl", reward=metrics["reward"], kl=metrics.get("kl", 0.0)
            )
            if step + 1 < self.config.steps:
                self.checkpoints.after(step + 1)
        self.checkpoints.finish()
        return {**metrics, **self.collector.proven()}

    def save(self, folder: Path) -> None:
        """Write the trained policy, and the prompts' pass rates, to `folder`, in this job's working folder."""
        self.turns.train()
        self.trainer.save(folder, self.context)
        if self.pass_rates is not None:
            self.pass_rates.write(folder)

    def _step(self, step: int) -> dict[str, float]:
        phase = PhaseTimer()
        trajectories, collected = self.collector.collect(step, phase)  # phases `rollout` and `reward`
        self.publisher.require_fresh(trajectories)

        with phase("score"):
            self.turns.train()
            rollouts = pack_trajectories(trajectories, self.processor, truncated=bool(self.config.sampling.truncation))
            logged = None if self.rollout_log is None else self.rollout_log.mask(step + 1, trajectories, rollouts)
            scored = self.trainer.score(rollouts, pack_hinted(trajectories), logged)

        with phase("advantage"):
            rewards = torch.tensor([t.reward for t in trajectories])  # step rewards are in `scored`
            group_size = self.config.settings.group_size
            groups = torch.arange(len(trajectories) // group_size).repeat_interleave(group_size)
            by_name = {
                # 0 of a reward that does not apply, as in the sum
                name: torch.tensor([t.extra.get(name, 0.0) for t in trajectories])
                for name in self.config.settings.rewards
            }
            batch = self.algorithm.advantages(scored, rewards, groups, self.trainer.kl_coefficient, by_name)
            require_finite(batch, trajectories)

        with phase("update"):
            masks = self.config.settings.mask_truncated_completions
            trained = without_truncated(batch, trajectories) if masks else batch
            updated = self.trainer.update(trained, step, logged)

        if self.rollout_log is not None:
            with phase("keep"):
                self.rollout_log.step(step + 1, trajectories, replace(batch, **updated.before))

        self.collector.trained(trajectories)
        if self.keeper is not None:
            with phase("keep"):
                self.keeper.rollouts(step + 1, trajectories)
                self.keeper.policy(step + 1)

        with phase("publish"):
            proof = self.publisher.publish()

        validated = self.validation.after(step + 1, phase) if self.validation is not None else {}
        return merged(describe(trajectories, scored), collected, updated.metrics, proof, validated, phase.take())


def describe(trajectories: Sequence[Trajectory], rollouts: Rollouts) -> dict[str, float]:
    """Return step metrics: total reward, reward by name, score, length, entropy, diversity.

    `entropy` is the mean of -log-prob over the sampled tokens: unbiased at the sampling temperature, without a forward.
    `distinct` is the share of distinct completions among those of one prompt. `solved_share` and `hopeless_share` are
    the shares of prompts all of whose completions score 1, or 0; `mixed_share` is that of the others.
    """
    tokens = max(rollouts.num_trained_tokens, 1)
    by_prompt: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_prompt.setdefault(trajectory.prompt.id, []).append(trajectory)
    rewards = torch.tensor([t.total_reward for t in trajectories])
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "completion_length": rollouts.num_trained_tokens / len(trajectories),
        "truncated_share": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
        "entropy": float(-rollouts.rollout_logprobs[rollouts.loss_mask].sum()) / tokens,
        "distinct": _mean([len({t.completion for t in group}) / len(group) for group in by_prompt.values()]),
    }
    for name in dict.fromkeys(name for t in trajectories for name in t.extra):
        values = [t.extra[name] for t in trajectories if name in t.extra]
        metrics[f"reward/{name}"] = _mean(values)
    for name in sorted({name for t in trajectories for name in t.environment_metrics}):
        counts = [t.environment_metrics.get(name, 0.0) for t in trajectories]
        metrics[f"environment/{name}"] = _mean(counts)
    scores = [t.score for t in trajectories if t.score is not None]
    if scores:
        metrics["score"] = _mean(scores)
        solved, hopeless = (
            _mean([all(t.score == score for t in group) for group in by_prompt.values()]) for score in (1.0, 0.0)
        )
        metrics |= {"solved_share": solved, "mixed_share": 1 - solved - hopeless, "hopeless_share": hopeless}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
