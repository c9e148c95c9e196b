"""A reward model as a reward: it reads tokens, at the last one of a completion or of each of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_core.config import rewards as config
from rlhf_core.data.chat import Tokenizer, encode_completion, load_tokenizer, stop_token_ids
from rlhf_core.errors import RewardError, StageError
from rlhf_core.models.folder import context_length, read_config
from rlhf_core.packing import pack
from rlhf_core.rewards.base import RewardResult, TrajectoryReward
from rlhf_core.rewards.build import implementation_of
from rlhf_core.rewards.steps import step_tokens
from rlhf_core.types import PackedBatch, Trajectory

# The reward model's raw score (N,) float32 at every token of a batch.
TokenScores = Callable[[PackedBatch], Tensor]


@dataclass(frozen=True, slots=True)
class RewardReader:
    """How the tokens of a reward model are read. The model itself is on the training ranks."""

    settings: config.ModelReward
    scale: Scale
    tokenizer: Tokenizer  # the policy's
    other: OtherTokenizer | None  # the reward model's, if it differs from the policy's

    @classmethod
    def of(cls, settings: config.ModelReward, folder: Path, policy: Path) -> RewardReader:
        """folder: the reward model's; policy: the policy's. With the same tokenizer and chat template, the reward model
        reads the policy's tokens. Raises StageError where it cannot give what the settings want."""
        tokenizer, own = load_tokenizer(policy), load_tokenizer(folder)
        other = None
        if not same_tokens(folder, policy) or tokenizer.chat_template != own.chat_template:
            other = OtherTokenizer(own, context_length(folder))
        if other is not None and settings.gives_steps:
            raise StageError(
                "the reward model's tokenizer differs from the policy's, so it cannot be read at the steps of the "
                "policy's tokens; train it from the same base model, or reward whole completions: type: reward_model"
            )
        return cls(settings, _scale(folder) if settings.normalize else Scale(), tokenizer, other)

    def reward(self, scores: TokenScores) -> TrajectoryReward:
        reward: TrajectoryReward = implementation_of(self.settings).of(self, self.settings, scores)
        return reward


def context_problem(folder: Path, tokens: int) -> str | None:
    """Why the model in `folder` cannot read sequences of `tokens` tokens; None where it can, or does not say."""
    context = context_length(folder)
    if context is None or context >= tokens:
        return None
    return f"its context is {context} tokens, and sequences have up to rollout.max_length={tokens}"


def same_tokens(folder: Path, other: Path) -> bool:
    """Whether two model folders have the same tokenizer."""
    return (folder / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of a reward model's rewards for held-out completions."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelReward:
    """One reward per completion, read at its last token."""

    scores: TokenScores
    scale: Scale
    other: OtherTokenizer | None

    @classmethod
    def of(cls, model: RewardReader, settings: config.RewardModelReward, scores: TokenScores) -> ModelReward:
        return cls(scores, model.scale, model.other)

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        batch = _own_tokens(trajectories) if self.other is None else self.other.batch(trajectories)
        raw = self.scores(batch)[batch.last_token_indices].tolist()
        rewards = [_scaled(value, trajectory, self.scale) for value, trajectory in zip(raw, trajectories, strict=True)]
        return RewardResult(rewards, [None] * len(rewards))

    def close(self) -> None:
        """No-op: the model is on the training ranks."""


@dataclass(frozen=True, slots=True)
class ProcessModelReward:
    """One reward per step, read at its last token; the completion has no other reward."""

    scores: TokenScores
    scale: Scale
    tokenizer: Tokenizer
    separator: str

    @classmethod
    def of(
        cls, model: RewardReader, settings: config.ProcessRewardModelReward, scores: TokenScores
    ) -> ProcessModelReward:
        return cls(scores, model.scale, model.tokenizer, settings.separator)

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        batch = _own_tokens(trajectories)
        raw = self.scores(batch).split(batch.sequence_lengths.tolist())
        steps = [
            [_scaled(value, trajectory, self.scale) for value in token_scores[self._ends(trajectory)].tolist()]
            for token_scores, trajectory in zip(raw, trajectories, strict=True)
        ]
        return RewardResult([0.0] * len(steps), [None] * len(steps), steps=steps, separator=self.separator)

    def _ends(self, trajectory: Trajectory) -> list[int]:
        return step_tokens(self.tokenizer, trajectory, self.separator)

    def close(self) -> None:
        """No-op: the model is on the training ranks."""


@dataclass(frozen=True, slots=True)
class OtherTokenizer:
    """Conversations in the reward model's own chat template and tokens."""

    tokenizer: Tokenizer
    context: int | None  # context length of the reward model in tokens; None: unknown

    def batch(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """Re-tokenise the text of each prompt and completion. Raises RewardError if one is too long."""
        sequences = [self._sequence(trajectory) for trajectory in trajectories]
        return pack(sequences, [[True] * len(sequence) for sequence in sequences])

    def _sequence(self, trajectory: Trajectory) -> list[int]:
        row = trajectory.prompt.row
        messages = row["prompt"] if trajectory.messages is None else trajectory.messages
        ids, is_assistant = encode_completion(self.tokenizer, messages, trajectory.completion, row.get("tools"))
        # As in its training: tokens that the template adds after the end of the turn are not read.
        length = max((index + 1 for index, sampled in enumerate(is_assistant) if sampled), default=len(ids))
        if trajectory.finish_reason == "length" and ids[length - 1] in stop_token_ids(self.tokenizer):
            length -= 1  # a truncated completion has no end-of-turn token
        if self.context is not None and length > self.context:
            raise RewardError(
                f"prompt {trajectory.prompt.id} with its completion has {length} tokens of the reward model, which "
                f"reads {self.context}; lower sampling.max_tokens"
            )
        return ids[:length]


def _own_tokens(trajectories: Sequence[Trajectory]) -> PackedBatch:
    return pack([t.token_ids for t in trajectories], [t.loss_mask for t in trajectories])


def _scaled(value: float, trajectory: Trajectory, scale: Scale) -> float:
    if not math.isfinite(value):
        raise RewardError(
            f"the reward model returned {value} for prompt {trajectory.prompt.id}: {trajectory.completion!r}"
        )
    return (value - scale.mean) / scale.std


def stored_scale(folder: Path) -> Scale | None:
    """What the reward model's config.json says of its rewards; None where it says nothing that can be used."""
    stored = read_config(folder)
    mean: Any = stored.get("reward_mean")
    std: Any = stored.get("reward_std")
    return Scale(float(mean), float(std)) if _is_finite(mean) and _is_finite(std) and std > 0 else None


def _scale(folder: Path) -> Scale:
    if (scale := stored_scale(folder)) is None:
        stored = read_config(folder)
        raise StageError(
            f"the reward model's config.json has reward_mean={stored.get('reward_mean')} and "
            f"reward_std={stored.get('reward_std')}, by which its rewards cannot be normalised; set normalize: false"
        )
    return scale


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
