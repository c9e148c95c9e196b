"""Preference pairs as examples: two sequences that begin with the same prompt, and stay together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlhf_core.chat.encoding import Encoded, as_messages, ended_completion
from rlhf_core.chat.image_messages import images_of, up_to_last_reply
from rlhf_core.chat.rendering import Message
from rlhf_core.chat.sampled_tokens import sampled_reply
from rlhf_core.data.fitting import Row
from rlhf_core.models.vision import ImageProcessor, RowImages, with_images
from rlhf_core.packing import pack
from rlhf_core.supervised.examples import Example, images_of_each
from rlhf_core.types import PreferenceBatch, SequenceImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def pair_example(tokenizer: PreTrainedTokenizerFast, row: Row, images: RowImages | None = None) -> Example:
    """Encode the chosen, then the rejected completion, each with its prompt and end; all tokens of both are trained.

    images: reads those of the row; none: the rows have none.
    """
    (chosen, chosen_mask, chosen_images), (rejected, rejected_mask, rejected_images) = (
        _with_images(
            ended_completion(tokenizer, row["prompt"], row[side], row.get("tools"), sampled=sampled_reply(row, side)),
            [*row["prompt"], *as_messages(row[side])],
            images,
        )
        for side in ("chosen", "rejected")
    )
    return Example(
        row["id"],
        (chosen, rejected),
        (chosen_mask, rejected_mask),
        margin=float(row.get("margin") or 0.0),
        images=(chosen_images, rejected_images) if chosen_images or rejected_images else (),
    )


def _with_images(
    sequence: Encoded, messages: Sequence[Message], images: RowImages | None
) -> tuple[list[int], list[bool], tuple[SequenceImage, ...]]:
    if images is None:
        return *sequence, ()
    return images.expanded(*sequence, images_of(up_to_last_reply(messages)))


def pack_pairs(examples: Sequence[Example], processor: ImageProcessor | None = None) -> PreferenceBatch:
    """Pack pairs, all of which have log-probs of the reference, or none.

    processor: of the model, if examples have images.
    """
    packed = pack(
        [ids for example in examples for ids in example.sequences],
        [mask for example in examples for mask in example.masks],
    )
    references = [value for example in examples for value in example.reference]
    batch = PreferenceBatch(
        input_ids=packed.input_ids,
        sequence_lengths=packed.sequence_lengths,
        loss_mask=packed.loss_mask,
        margins=torch.tensor([example.margin for example in examples], dtype=torch.float32),
        reference_logprobs=torch.tensor(references, dtype=torch.float32) if references else None,
    )
    return with_images(batch, images_of_each(examples), processor)
