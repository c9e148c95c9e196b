"""A process reward model in token form as a reward: the probability of a right step, read at a tag after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.chat.step_tags import encode_tagged
from rlhf_core.chat.steps import step_texts
from rlhf_core.errors import ConversationError, RewardError
from rlhf_core.models.folders.readers import Scale
from rlhf_core.packing import pack
from rlhf_core.rewards.base import RewardResult
from rlhf_core.types import PackedBatch, Trajectory


@dataclass(frozen=True, slots=True)
class StepTagReward:
    """One reward per step: the model reads the steps as text with its tag after each, in its own tokens."""

    scores: Callable[[PackedBatch], Tensor]  # log-odds of a right step, (N,) float32 at the trained tokens of a batch
    scale: Scale
    tokenizer: Tokenizer  # the reward model's
    context: int | None  # its length, in tokens; None: unknown
    separator: str
    tag: str

    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        encoded = [self._encoded(trajectory) for trajectory in trajectories]
        masks = [[index in set(ends) for index in range(len(ids))] for ids, ends in encoded]
        batch = pack([ids for ids, _ in encoded], masks)
        odds = self.scores(batch).split(batch.sequence_lengths.tolist())
        steps = []
        for each, (_, ends), trajectory in zip(odds, encoded, trajectories, strict=True):
            read = each[ends]
            if not bool(read.isfinite().all()):
                raise RewardError(f"the reward model returned {read.tolist()} for prompt {trajectory.prompt.id}")
            steps.append([(right - self.scale.mean) / self.scale.std for right in read.sigmoid().tolist()])
        return RewardResult([0.0] * len(steps), [None] * len(steps), steps=steps, separator=self.separator)

    def _encoded(self, trajectory: Trajectory) -> tuple[list[int], list[int]]:
        row = trajectory.prompt.row
        messages = row["prompt"] if trajectory.messages is None else trajectory.messages
        steps = step_texts(trajectory.completion, self.separator)
        try:
            ids, ends = encode_tagged(
                self.tokenizer, messages, steps, separator=self.separator, tag=self.tag, tools=row.get("tools")
            )
        except ConversationError as error:
            raise RewardError(f"prompt {trajectory.prompt.id}: {error}") from error
        if self.context is not None and len(ids) > self.context:
            raise RewardError(
                f"prompt {trajectory.prompt.id} with its tagged completion has {len(ids)} tokens of the reward model, "
                f"which reads {self.context}; lower sampling.max_tokens"
            )
        return ids, ends

    def close(self) -> None:
        """No-op: the model is on the training ranks."""
