"""Reward model trained on given rewards per token: the quality of a completion, or the correctness of a step.

The trained tokens of an example are those with a target: the last one of a completion, or of each step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf_core.chat.encoding import ended_completion
from rlhf_core.chat.sampled_tokens import reply_of
from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig, RewardRegressionConfig
from rlhf_core.data.fitting import Row
from rlhf_core.data.formats.stepwise import encode_steps
from rlhf_core.losses.targets import regression_loss, step_loss
from rlhf_core.metrics import LossAndMetrics, Metric
from rlhf_core.packing import pack
from rlhf_core.supervised.examples import Example, Shard
from rlhf_core.supervised.scalar import ScalarWorker
from rlhf_core.supervised.worker import C, exact_share
from rlhf_core.types import TargetBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def rewarded_completions(tokenizer: PreTrainedTokenizerFast, row: Row) -> list[Example]:
    """Encode each completion of a row of the format `completions`, all of which have rewards, with its prompt."""
    examples = []
    for completion in row["completions"]:
        ids, _ = ended_completion(
            tokenizer, row["prompt"], completion["text"], row.get("tools"),
            sampled=reply_of(completion, row.get("tokenizer")),
        )  # fmt: skip
        examples.append(_example(row, ids, [len(ids) - 1], [completion["reward"]]))
    return examples


def labelled_steps(tokenizer: PreTrainedTokenizerFast, row: Row) -> Example:
    """Encode the steps of a row of the format `stepwise` with a `separator`; steps without a label are not trained."""
    ids, ends = encode_steps(tokenizer, row)
    judged = [(end, label) for end, label in zip(ends, row["labels"], strict=True) if label is not None]
    return _example(row, ids, [end for end, _ in judged], [label for _, label in judged])


def _example(row: Row, ids: list[int], places: Sequence[int], targets: Sequence[float]) -> Example:
    mask = [False] * len(ids)
    for place in places:
        mask[place] = True
    return Example(row["id"], (ids,), (mask,), targets=tuple(targets))


def pack_targets(examples: Sequence[Example]) -> TargetBatch:
    packed = pack([e.sequences[0] for e in examples], [e.masks[0] for e in examples])
    targets = torch.zeros(packed.num_tokens, dtype=torch.float32)
    targets[packed.loss_mask] = torch.tensor([target for e in examples for target in e.targets], dtype=torch.float32)
    return TargetBatch(**vars(packed), targets=targets)


class TargetWorker(ScalarWorker[C]):
    @abstractmethod
    def to_targets(self, rewards: Tensor, targets: Tensor, count: int) -> LossAndMetrics:
        """Return the loss of the rewards (K,) at the trained tokens.

        count: trained tokens of the whole step over all ranks.
        """

    def judged(
        self, model: nn.Module, batch: TargetBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> tuple[Tensor, Mapping[str, Metric], Tensor]:
        scores, _, routing = model(batch, with_routing=step_routing is not None)
        assert batch.targets is not None
        rewards = scores[batch.loss_mask]
        loss, metrics = self.to_targets(rewards, batch.targets[batch.loss_mask], shard.num_tokens)
        return *self.balanced(loss, metrics, routing, step_routing), rewards


class RewardRegressionWorker(TargetWorker[RewardRegressionConfig]):
    def to_targets(self, rewards: Tensor, targets: Tensor, count: int) -> LossAndMetrics:
        return regression_loss(rewards, targets, num_completions=count)


class ProcessRewardModelWorker(TargetWorker[ProcessRewardModelConfig]):
    def to_targets(self, rewards: Tensor, targets: Tensor, count: int) -> LossAndMetrics:
        return step_loss(rewards, targets, num_steps=count)

    def validate(self, shard: Shard) -> dict[str, float]:
        measured = super().validate(shard)
        return measured | {"accuracy": exact_share(measured["accuracy"], shard.num_tokens)}
