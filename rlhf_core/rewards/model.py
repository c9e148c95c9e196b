"""A reward model as a reward: it reads tokens, at the last one of a completion or of each of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rlhf_core.chat.encoding import Tokenizer, ended_completion, load_tokenizer, stop_token_ids
from rlhf_core.chat.rendering import Message, Tools
from rlhf_core.chat.steps import step_tokens
from rlhf_core.config.rewards import rewards as config
from rlhf_core.errors import RewardError, StageError
from rlhf_core.models.folders.folder import context_length, read_config
from rlhf_core.models.folders.readers import (
    STORED_SEPARATOR,
    STORED_TAG,
    Scale,
    images_problem,
    judge_problem,
    same_tokens,
    scale_problem,
    separator_problem,
    stored_scale,
)
from rlhf_core.models.vision import ImageProcessor, open_processor, with_images
from rlhf_core.packing import pack
from rlhf_core.rewards.base import RewardResult, TrajectoryReward
from rlhf_core.rewards.build import implementation_of
from rlhf_core.rewards.step_tags import StepTagReward
from rlhf_core.types import PackedBatch, Trajectory

# The reward model's raw score (N,) float32 at every token of a batch.
TokenScores = Callable[[PackedBatch], Tensor]


@dataclass(frozen=True, slots=True)
class RewardReader:
    """Tokens of a reward model. The model itself is on the training ranks."""

    settings: config.ModelReward
    scale: Scale
    tokenizer: Tokenizer  # the policy's
    other: OtherTokenizer | None  # the reward model's, if it differs from the policy's
    tag: str | None = None  # of a process reward model in token form
    context: int | None = None  # of the reward model in tokens; None: unknown
    processor: ImageProcessor | None = None  # the policy's, if the reward model reads its images; None: it reads none

    @classmethod
    def of(cls, settings: config.ModelReward, folder: Path, policy: Path, tokens: int) -> RewardReader:
        """Create the reader of a reward model.

        folder: the reward model's; policy: the policy's; tokens: of the longest sequence. With the same tokenizer and
        chat template, the reward model reads the policy's tokens. Raises StageError if the model cannot fulfil the
        settings.
        """
        tokenizer, own_tokenizer = load_tokenizer(policy), load_tokenizer(folder)
        other = None
        if not same_tokens(folder, policy) or tokenizer.chat_template != own_tokenizer.chat_template:
            other = OtherTokenizer(own_tokenizer, context_length(folder))
        stored = read_config(folder)
        problem = judge_problem(stored, settings, reads_tokens=other is None, tokens=tokens)
        problem = (
            problem or scale_problem(stored, settings) or separator_problem(stored.get(STORED_SEPARATOR), settings)
        )
        if problem:
            raise StageError(problem)
        scale = stored_scale(stored) if settings.normalize else None
        reads = other is None and STORED_TAG not in stored and images_problem(folder, policy) is None
        return cls(
            settings, scale or Scale(), tokenizer, other, stored.get(STORED_TAG), context_length(folder),
            open_processor(policy) if reads else None,
        )  # fmt: skip

    def reward(self, scores: TokenScores) -> TrajectoryReward:
        reward: TrajectoryReward = implementation_of(self.settings).of(self, self.settings, scores)
        return reward


@dataclass(frozen=True, slots=True)
class ModelReward:
    """One reward per completion, read at its last token."""

    scores: TokenScores
    scale: Scale
    other: OtherTokenizer | None
    processor: ImageProcessor | None

    @classmethod
    def of(cls, model: RewardReader, settings: config.RewardModelReward, scores: TokenScores) -> ModelReward:
        return cls(scores, model.scale, model.other, model.processor)

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        batch = self._batch(trajectories)
        raw = self.scores(batch)[batch.last_token_indices].tolist()
        rewards = [_scaled(value, trajectory, self.scale) for value, trajectory in zip(raw, trajectories, strict=True)]
        return RewardResult(rewards, [None] * len(rewards))

    def _batch(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        other = self.other
        return _own_tokens(trajectories, self.processor) if other is None else other.batch(trajectories)

    def close(self) -> None:
        """No-op: the model is on the training ranks."""


@dataclass(frozen=True, slots=True)
class ProcessModelReward:
    """One reward per step, read at its last token; the completion has no other reward."""

    scores: TokenScores
    scale: Scale
    tokenizer: Tokenizer
    separator: str
    processor: ImageProcessor | None

    @classmethod
    def of(
        cls, model: RewardReader, settings: config.ProcessRewardModelReward, scores: TokenScores
    ) -> ProcessModelReward | StepTagReward:
        if model.tag is not None:
            tokenizer = model.tokenizer if model.other is None else model.other.tokenizer
            return StepTagReward(scores, model.scale, tokenizer, model.context, settings.separator, model.tag)
        return cls(scores, model.scale, model.tokenizer, settings.separator, model.processor)

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        batch = _own_tokens(trajectories, self.processor)
        raw = self.scores(batch).split(batch.sequence_lengths.tolist())
        steps = [
            [_scaled(value, trajectory, self.scale) for value in token_scores[self._ends(trajectory)].tolist()]
            for token_scores, trajectory in zip(raw, trajectories, strict=True)
        ]
        return RewardResult([0.0] * len(steps), [None] * len(steps), steps=steps, separator=self.separator)

    def _ends(self, trajectory: Trajectory) -> list[int]:
        return step_tokens(self.tokenizer, trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), self.separator)

    def close(self) -> None:
        """No-op: the model is on the training ranks."""


@dataclass(frozen=True, slots=True)
class OtherTokenizer:
    """Conversations in the reward model's own chat template and tokens."""

    tokenizer: Tokenizer
    context: int | None  # context length of the reward model in tokens; None: unknown

    def batch(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """Tokenize the text of each prompt and completion again. Raises RewardError if one is too long."""
        sequences = [self._sequence(trajectory) for trajectory in trajectories]
        return pack(sequences, [[True] * len(sequence) for sequence in sequences])

    def _sequence(self, trajectory: Trajectory) -> list[int]:
        row = trajectory.prompt.row
        messages = row["prompt"] if trajectory.messages is None else trajectory.messages
        ids = self.tokens(messages, trajectory.completion, row.get("tools"))
        if trajectory.finish_reason == "length" and ids[-1] in stop_token_ids(self.tokenizer):
            ids = ids[:-1]  # a truncated completion has no end-of-turn token
        if self.context is not None and len(ids) > self.context:
            raise RewardError(
                f"prompt {trajectory.prompt.id} with its completion has {len(ids)} tokens of the reward model, which "
                f"reads {self.context}; lower sampling.max_tokens"
            )
        return ids

    def tokens(self, messages: Sequence[Message], completion: str, tools: Tools | None = None) -> list[int]:
        """Return the reward model's tokens of a finished completion of `messages`."""
        ids, _ = ended_completion(self.tokenizer, messages, completion, tools)
        return ids


def _own_tokens(trajectories: Sequence[Trajectory], processor: ImageProcessor | None) -> PackedBatch:
    batch = pack([t.token_ids for t in trajectories], [t.loss_mask for t in trajectories])
    return with_images(batch, [t.prompt.images + t.feedback_images for t in trajectories], processor)


def _scaled(value: float, trajectory: Trajectory, scale: Scale) -> float:
    return scaled(value, scale, f"prompt {trajectory.prompt.id}: {trajectory.completion!r}")


def scaled(value: float, scale: Scale, where: str) -> float:
    """Scale a raw score to a reward. Raises RewardError if the score is not finite."""
    if not math.isfinite(value):
        raise RewardError(f"the reward model returned {value} for {where}")
    return (value - scale.mean) / scale.std
