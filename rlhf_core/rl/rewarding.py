"""Rewards of trajectories. An invalid reward stops the run before it is trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.chat.steps import step_tokens
from rlhf_core.config.rewards.rewards import GroupReward, TextReward
from rlhf_core.config.rl.algorithms import AlgorithmConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards import RewardResult, TrajectoryReward
from rlhf_core.rewards.base import fits, written
from rlhf_core.rewards.shaping import Shaping
from rlhf_core.rewards.text import rewarded
from rlhf_core.rl.filtering import Group
from rlhf_core.types import Trajectory

_SHOWN_FAILURES = 3  # per reward and step


class RewardPipeline:
    """The reward pipeline, in order.

    1. Every reward judges every completion, a reward of groups those of a prompt together; a failure, a wrong number
       of values or a non-finite one ends the run, except for the share that the reward's `tolerated_failures` allows.
       A reward may leave out completions that it does not apply to, but not all rewards the same one.
    2. Their weighted sum. Step rewards are weighted too, summed at the last tokens of the steps, and not shaped.
    3. Shaping (rewards/shaping.py): overlong penalty, truncation, clipping, running normalisation.
    Dynamic filtering (rl/collector.py) uses scores, which are neither weighted nor shaped; advantages follow it.

    The score of a completion is that of the reward named by `filtering.score`, else of the only reward with scores.
    """

    def __init__(
        self, settings: AlgorithmConfig, max_tokens: int, rewards: Mapping[str, TrajectoryReward], tokenizer: Tokenizer
    ) -> None:
        """rewards: by name, as in `settings.rewards`; tokenizer: the policy's."""
        self._settings = settings
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._shaping = Shaping(settings.shaping, max_tokens)
        self._tolerant = [
            name
            for name, reward in settings.rewards.items()
            if isinstance(reward, TextReward | GroupReward) and reward.tolerated_failures
        ]
        self._failures: Counter[str] = Counter()

    def __call__(self, groups: Sequence[Group]) -> list[Group | None]:
        """Return the groups with reward, score, step rewards, and each reward by name in `extra`, of each trajectory.

        If a tolerant reward fails for a completion, its whole group is None: a baseline of the rest would be that of
        another group. `take_failures` counts the failed completions.
        """
        if not groups:
            return []
        trajectories = [trajectory for group in groups for trajectory in group]
        group_of = [number for number, group in enumerate(groups) for _ in group]
        results = {name: rewarded(reward, groups) for name, reward in self._rewards.items()}
        for name, result in results.items():
            self._failures[name] += len(result.failures)
            for index, why in list(result.failures.items())[:_SHOWN_FAILURES]:
                print(f"reward {name}, tolerated: {why} (prompt {trajectories[index].prompt.id})", flush=True)
        failed = {group_of[index] for result in results.values() for index in result.failures}
        failed |= {group_of[index] for index in self._unjudged(trajectories, results)}
        kept = [index for index, number in enumerate(group_of) if number not in failed]
        with_rewards = iter(
            self._rewarded([trajectories[index] for index in kept], {name: r.of(kept) for name, r in results.items()})
        )
        return [
            None if number in failed else list(islice(with_rewards, len(group))) for number, group in enumerate(groups)
        ]

    def _unjudged(self, trajectories: Sequence[Trajectory], results: Mapping[str, RewardResult]) -> list[int]:
        """Return the completions that no reward applies to, which count as failures of each.

        Raises RewardError if there are more than each reward tolerates.
        """
        if not results:
            return []
        unjudged = sorted(frozenset.intersection(*(result.inapplicable for result in results.values())))
        tolerated = min(getattr(self._settings.rewards[name], "tolerated_failures", 0.0) for name in results)
        if len(unjudged) > tolerated * len(trajectories):
            raise RewardError(
                f"completion {unjudged[0]}, row {trajectories[unjudged[0]].prompt.id}: no reward applies to it: "
                f"{', '.join(results)} returned None"
            )
        for name in results:
            self._failures[name] += len(unjudged)
        return unjudged

    def _rewarded(self, trajectories: Sequence[Trajectory], results: Mapping[str, RewardResult]) -> list[Trajectory]:
        """Return `trajectories`, for none of which a reward failed, with their rewards from `results`."""
        if not trajectories:
            return []
        weights = {name: reward.weight for name, reward in self._settings.rewards.items()}
        for name, result in results.items():
            _require_finite(name, result, weights[name], trajectories)
        sums = [
            math.fsum(weights[name] * result.rewards[index] for name, result in results.items())
            for index in range(len(trajectories))
        ]
        lengths = [t.num_sampled_tokens for t in trajectories]
        shaped = self._shaping(sums, lengths, [t.finish_reason == "length" for t in trajectories])
        steps = self._step_rewards(trajectories, results)
        scored_by = self._scored_by(results)
        metrics = _metrics(results, len(trajectories), scored_by)
        return [
            replace(
                trajectory,
                reward=_finite(shaped[index], "shaped reward", trajectory, index),
                score=results[scored_by].scores[index] if scored_by else None,
                step_rewards=steps[index][0] if steps else None,
                step_ends=steps[index][1] if steps else None,
                extra={name: values[index] for name, values in metrics.items() if index in values},
            )
            for index, trajectory in enumerate(trajectories)
        ]

    def take_failures(self) -> dict[str, float]:
        """Return the failed completions of each tolerant reward since the last call, as metrics."""
        return {f"reward/{name}/failures": float(self._failures.pop(name, 0)) for name in self._tolerant}

    def _step_rewards(
        self, trajectories: Sequence[Trajectory], results: Mapping[str, RewardResult]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Return for each trajectory its step rewards, (T,) float32, and the mask of last tokens of steps, (T,) bool.

        None if no reward has step rewards. Rewards with different steps are summed at each token.
        """
        step_results = {name: result for name, result in results.items() if result.steps is not None}
        if not step_results:
            return None
        if not self._settings.takes_process_rewards:
            raise RewardError(f"reward {next(iter(step_results))} gives `steps`, which this algorithm cannot use")
        rewards_and_ends = [(torch.zeros(t.token_ids.numel()), torch.zeros_like(t.loss_mask)) for t in trajectories]
        for name, result in step_results.items():
            weight, separator = self._settings.rewards[name].weight, result.separator
            for index, (trajectory, rewards) in enumerate(zip(trajectories, result.steps or (), strict=True)):
                ends = step_tokens(
                    self._tokenizer, trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), separator
                )
                if len(rewards) != len(ends):
                    raise RewardError(
                        f"reward {name}, completion {index} ({trajectory.completion!r}): expected {len(ends)} step "
                        f"rewards, given {len(rewards)}; steps are the non-blank parts between {separator!r}"
                    )
                rewards_and_ends[index][0].index_add_(0, torch.tensor(ends), weight * torch.tensor(rewards))
                rewards_and_ends[index][1][ends] = True
        for index, (trajectory, (rewards_at, _)) in enumerate(zip(trajectories, rewards_and_ends, strict=True)):
            _finite(float(rewards_at.abs().max()), "sum of the rewards of its steps", trajectory, index)
        return rewards_and_ends

    def _scored_by(self, results: Mapping[str, RewardResult]) -> str | None:
        with_scores = [name for name, result in results.items() if None not in result.scores]
        filtering = self._settings.filtering
        if filtering is None:
            return with_scores[0] if len(with_scores) == 1 else None
        if filtering.score in with_scores:
            return filtering.score
        if filtering.score is None and len(with_scores) == 1:
            return with_scores[0]
        expected = (
            f"one from `{filtering.score}`" if filtering.score else "exactly one, or `filtering.score` to name it"
        )
        raise RewardError(
            f"dynamic filtering needs a score of every completion: {expected}; the rewards that give scores are "
            f"{', '.join(with_scores) or 'none'}; without one, set filtering: null"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"shaping": self._shaping.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._shaping.load_state_dict(state["shaping"])


def _metrics(results: Mapping[str, RewardResult], count: int, scored_by: str | None) -> dict[str, Mapping[int, float]]:
    """Return values by completion: `name`, its unweighted reward with steps, and `name/metric`, the other values.

    A completion that a reward does not apply to has none of its values.
    """
    metrics: dict[str, Mapping[int, float]] = {}
    for name, result in results.items():
        steps = result.steps or [[]] * count
        by_name: dict[str, Sequence[float]] = {
            name: [math.fsum([reward, *of_steps]) for reward, of_steps in zip(result.rewards, steps, strict=True)]
        }
        if result.steps is not None:
            by_name[f"{name}/steps"] = [float(len(steps)) for steps in result.steps]
        scores = [score for score in result.scores if score is not None]
        if len(scores) == count and name != scored_by:
            by_name[f"{name}/score"] = scores
        by_name |= {f"{name}/{extra}": values for extra, values in result.extra.items()}
        applicable = [index for index in range(count) if index not in result.inapplicable]
        metrics |= {key: {index: values[index] for index in applicable} for key, values in by_name.items()}
    return metrics


def _require_finite(name: str, result: RewardResult, weight: float, trajectories: Sequence[Trajectory]) -> None:
    """Raise RewardError if a reward, of a completion or of a step, is not finite in float32, unweighted or weighted."""
    for index, trajectory in enumerate(trajectories):
        steps = result.steps[index] if result.steps is not None else []
        for value in (result.rewards[index], *steps):
            problem = f"the reward is {written(value)}" if not fits(value) else ""
            if not problem and not fits(weight * value):
                problem = f"the reward times its weight {weight:g} is {written(weight * value)}"
            if problem:
                raise RewardError(
                    f"reward {name}, completion {index}, row {trajectory.prompt.id}: {problem}, expected a finite "
                    "number that float32 holds"
                )


def _finite(value: float, what: str, trajectory: Trajectory, index: int) -> float:
    if not fits(value):
        raise RewardError(
            f"completion {index}, row {trajectory.prompt.id}: the {what} is {written(value)}, which float32 does not "
            "hold; look at the weights of the rewards"
        )
    return value


def monitor(trajectories: Sequence[Trajectory], monitors: Mapping[str, TrajectoryReward]) -> dict[str, float]:
    """Return the mean of each monitor, a reward that is logged and never trained on."""
    metrics = {}
    for name, scorer in monitors.items():
        result = scorer(trajectories)
        left_out = result.failures.keys() | result.inapplicable
        rewards = [reward for index, reward in enumerate(result.rewards) if index not in left_out]
        metrics[f"monitor/{name}"] = math.fsum(rewards) / len(rewards) if rewards else math.nan
    return metrics
