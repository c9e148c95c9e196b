"""Reward model from preference pairs: the reward is read at the last token of a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.data.fitting import Row
from rlhf_core.losses.ranking import pairwise_loss
from rlhf_core.losses.supervised import next_token_loss
from rlhf_core.metrics import Metric, Sum, merged
from rlhf_core.supervised.examples import Example, Shard
from rlhf_core.supervised.pairs import pair_example
from rlhf_core.supervised.scalar import ScalarWorker
from rlhf_core.supervised.worker import exact_share
from rlhf_core.types import PreferenceBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf_core.models.vision import RowImages


def judged_pair(tokenizer: PreTrainedTokenizerFast, row: Row, images: RowImages | None = None) -> Example:
    """Encode a pair; only tokens of the chosen completion are trained, by the language modelling term.

    The rewards of both are read at their last tokens. images: reads those of the row; none: the rows have none.
    """
    pair = pair_example(tokenizer, row, images)
    return replace(pair, masks=(pair.masks[0], [False] * len(pair.masks[1])))


class RewardModelWorker(ScalarWorker[RewardModelConfig]):
    """Trains the pairwise loss and, if configured, language modelling of chosen completions."""

    @property
    def language(self) -> bool:
        return self.config.language_model_coefficient > 0

    def judged(
        self, model: nn.Module, batch: PreferenceBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> tuple[Tensor, Mapping[str, Metric], Tensor]:
        """Return rewards (P, 2) of both completions of each pair."""
        config = self.config
        scores, logprobs, routing = model(batch, with_routing=step_routing is not None)
        last = batch.last_token_indices
        real = batch.loss_mask[last][0::2]  # a pair of which nothing is trained is a filler
        chosen, rejected = scores[last][0::2][real], scores[last][1::2][real]
        assert batch.margins is not None
        loss, metrics = pairwise_loss(
            chosen, rejected, batch.margins[real], num_pairs=shard.num_examples, centring=config.centring_coefficient
        )
        if logprobs is not None:
            language = next_token_loss(logprobs, batch.loss_mask, num_tokens=shard.num_tokens)
            loss = loss + config.language_model_coefficient * language
            metrics = merged(metrics, {"language_model_loss": Sum(language.detach())})
        loss, metrics = self.balanced(loss, metrics, routing, step_routing)
        return loss, metrics, torch.stack([chosen, rejected], dim=1)

    def validate(self, shard: Shard) -> dict[str, float]:
        measured = super().validate(shard)
        return measured | {"accuracy": exact_share(measured["accuracy"], shard.num_examples)}
