"""KTO on one rank, and its examples: labelled completions, and the unpaired ones for the KL estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf_core.chat.encoding import ended_completion
from rlhf_core.chat.image_messages import images_of
from rlhf_core.chat.sampled_tokens import sampled_reply
from rlhf_core.config.stages.kto import KTOConfig
from rlhf_core.data.fitting import Row
from rlhf_core.losses.kto import kto_loss
from rlhf_core.metrics import LossAndMetrics, Sum
from rlhf_core.models.vision import ImageProcessor, RowImages, with_images
from rlhf_core.packing import pack, select_sequences
from rlhf_core.supervised.examples import Example, Shard, images_of_each
from rlhf_core.supervised.referenced import ReferencedWorker, sums_by_sequence, trained_lengths
from rlhf_core.types import LabelledBatch, PackedBatch, UnpairedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def labelled_example(tokenizer: PreTrainedTokenizerFast, row: Row, images: RowImages | None = None) -> Example:
    """Encode a prompt with its completion; all tokens of the completion, including its end, are trained.

    images: reads those of the prompt; none: the rows have none.
    """
    ids, mask = ended_completion(
        tokenizer, row["prompt"], row["completion"], row.get("tools"), sampled=sampled_reply(row, "completion")
    )
    if images is None:
        return Example(row["id"], (ids,), (mask,), desirable=bool(row["label"]))
    ids, mask, found = images.expanded(ids, mask, images_of(row["prompt"]))
    return Example(row["id"], (ids,), (mask,), images=(found,) if found else (), desirable=bool(row["label"]))


def pack_unpaired(
    examples: Sequence[Example], max_length: int, processor: ImageProcessor | None = None
) -> UnpairedBatch:
    """Pack each example, and its prompt with the completion of the next one, cut at `max_length`.

    processor: of the model, if examples have images.
    """
    sequences, masks = [], []
    for example, other in zip(examples, [*examples[1:], examples[0]], strict=True):
        (ids,), (mask,) = example.sequences, example.masks
        prompt, completion = ids[: mask.index(True)], other.sequences[0][other.masks[0].index(True) :]
        sequences += [ids, (prompt + completion)[:max_length]]
        masks += [mask, ([False] * len(prompt) + [True] * len(completion))[:max_length]]
    of_prompts = [images for images in images_of_each(examples) for _ in range(2)]
    packed = with_images(pack(sequences, masks), of_prompts, processor)
    return UnpairedBatch(**vars(packed), desirable=torch.tensor([example.desirable for example in examples]))


@dataclass(frozen=True, slots=True)
class KTOShard(Shard):
    """Completions with their own prompts, and the totals of the whole step, over all ranks."""

    divergence: float  # z
    num_desirable: int


def apart(batch: PackedBatch) -> tuple[LabelledBatch, LabelledBatch]:
    """Split into completions with their own prompts, and those with other prompts."""
    assert isinstance(batch, UnpairedBatch)
    matched, others = (
        LabelledBatch(
            **vars(select_sequences(batch, range(first, batch.num_sequences, 2))),
            desirable=batch.desirable,
        )
        for first in (0, 1)
    )
    return matched, others


def log_ratios(logprobs: Tensor, batch: LabelledBatch) -> Tensor:
    """Return r of each completion, (S,); 0 for a filler. logprobs: (N,) float32, by the policy."""
    assert batch.reference_logprobs is not None
    return sums_by_sequence(logprobs, batch) - batch.reference_logprobs


def _ratios_and_labels(model: nn.Module, batch: LabelledBatch) -> Tensor:
    """Return the sum of r, and the number of good examples: (2,)."""
    assert batch.desirable is not None
    ratios = log_ratios(model(batch, only=batch.loss_mask)[0], batch)
    return torch.stack([ratios.sum(), (batch.desirable & (trained_lengths(batch) > 0)).sum()])


class KTOWorker(ReferencedWorker[KTOConfig]):
    def prepared(self, shard: Shard) -> KTOShard:
        """Add the KL of the whole step, estimated with the current weights."""
        parts = [apart(batch) for batch in shard.micro_batches]
        matched, others = (self.with_reference(batches) for batches in zip(*parts, strict=True))
        ratios, good = self.engine.total(others, _ratios_and_labels).tolist()
        return KTOShard(
            matched, shard.num_tokens, shard.num_examples,
            divergence=max(0.0, ratios / shard.num_examples), num_desirable=round(good),
        )  # fmt: skip

    def loss(
        self, model: nn.Module, batch: LabelledBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> LossAndMetrics:
        assert isinstance(shard, KTOShard)
        assert batch.desirable is not None
        config = self.config
        logprobs, _, routing = model(batch, only=batch.loss_mask, with_routing=step_routing is not None)
        real = trained_lengths(batch) > 0  # of a filler nothing is trained
        ratios, desirable = log_ratios(logprobs, batch)[real], batch.desirable[real]
        losses = kto_loss(
            ratios, shard.divergence, desirable,
            beta=config.beta, desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight,
        )  # fmt: skip
        loss = losses.sum() / shard.num_examples
        rewards = config.beta * ratios.detach()
        right = (ratios.detach() > shard.divergence) == desirable
        bad = shard.num_examples - shard.num_desirable
        metrics = {
            "accuracy": Sum(right.sum() / shard.num_examples),
            "desirable_reward": Sum(rewards[desirable].sum() / max(shard.num_desirable, 1)),
            "undesirable_reward": Sum(rewards[~desirable].sum() / max(bad, 1)),
            "desirable_share": Sum(desirable.sum() / shard.num_examples),
            "kl": Sum(ratios.new_tensor(shard.divergence * len(ratios) / shard.num_examples)),
        }
        return self.balanced(loss, metrics, routing, step_routing)
