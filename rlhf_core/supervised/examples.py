"""Examples of supervised training: truncation, and division over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlhf_core.division import Division
from rlhf_core.types import PackedBatch, SequenceImage


@dataclass(frozen=True, slots=True)
class Example:
    """The unit of a batch size: one sequence, or the two sequences of a pair, chosen first."""

    row_id: str
    sequences: tuple[list[int], ...]  # token ids
    masks: tuple[list[bool], ...]  # true where the token is trained; as long as the sequence
    margin: float = 0.0  # of a pair
    desirable: bool = True  # of a labelled completion
    targets: tuple[float, ...] = ()  # of each trained token, where a reward is learned there
    reference: tuple[float, ...] = ()  # log-probs of the sequences' trained tokens together, where they are known
    images: tuple[tuple[SequenceImage, ...], ...] = ()  # of each sequence, in the order of their tokens; or of none

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def num_trained_tokens(self) -> int:
        return sum(map(sum, self.masks))


Packer = Callable[[Sequence[Example]], PackedBatch]


@dataclass(frozen=True, slots=True)
class Shard:
    """One replica's part of one optimizer step, with the totals over all replicas that normalise its sums."""

    micro_batches: list[PackedBatch]
    num_tokens: int  # trained tokens
    num_examples: int


def truncated(example: Example, max_length: int) -> Example | None:
    """Cut the example's sequences at their ends: no token is added, so no EOS is taught at the cut.

    None if a sequence loses all of its trained tokens, if the completions of a pair become equal, or if an image would
    be cut.
    """
    if any(image.start + image.length > max_length for images in example.images for image in images):
        return None
    sequences = tuple(ids[:max_length] for ids in example.sequences)
    masks = tuple(mask[:max_length] for mask in example.masks)
    emptied = any(any(mask) and not any(cut) for mask, cut in zip(example.masks, masks, strict=True))
    if emptied or any(ids == sequences[0] for ids in sequences[1:]):
        return None
    return replace(example, sequences=sequences, masks=masks)


def divide(
    batch: PackedBatch, replicas: int, tokens_per_micro_batch: int, *, shares_prompts: bool = False
) -> list[Shard]:
    """Divide the batch of one optimizer step into one shard per replica; every rank runs the same number of forwards.

    shares_prompts: as in Division.of.
    """
    division = Division.of(
        batch, replicas=replicas, tokens_per_micro_batch=tokens_per_micro_batch, shares_prompts=shares_prompts
    )
    return [Shard(part, batch.num_trained_tokens, batch.num_examples) for part in division.split()]


def images_of_each(examples: Sequence[Example]) -> list[tuple[SequenceImage, ...]]:
    """Return the images of each sequence of each example."""
    return [images for example in examples for images in example.images or ((),) * len(example.sequences)]
