"""Language modelling: conversations with trained assistant turns, and documents whose tokens are all trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf_core.chat.encoding import encode_conversation, encode_text
from rlhf_core.chat.image_messages import images_of, up_to_last_reply
from rlhf_core.chat.sampled_tokens import sampled_reply
from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.data.fitting import Row
from rlhf_core.errors import ConversationError
from rlhf_core.losses.supervised import next_token_loss
from rlhf_core.metrics import LossAndMetrics
from rlhf_core.models.vision import ImageProcessor, RowImages, with_images
from rlhf_core.packing import pack
from rlhf_core.supervised.examples import Example, Shard, images_of_each
from rlhf_core.supervised.policy import PolicyWorker
from rlhf_core.types import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def conversation_examples(
    tokenizer: PreTrainedTokenizerFast, row: Row, images: RowImages | None = None
) -> list[Example]:
    """Encode each sequence of a conversation, usually one, as an example; assistant turns are trained, with their ends.

    images: reads those of the row; none: the rows have none.
    """
    encoded = encode_conversation(tokenizer, row["messages"], row.get("tools"), sampled=sampled_reply(row, "messages"))
    if images is None:
        return [Example(row["id"], (ids,), (_after_first(mask),)) for ids, mask in encoded]
    digests = images_of(up_to_last_reply(row["messages"]))
    if digests and len(encoded) > 1:
        raise ConversationError(
            "the chat template rewrites earlier turns, which is not supported for conversations with images: give the "
            "base stage a chat_template that only appends"
        )
    examples = []
    for ids, mask in encoded:
        ids, mask, placed = images.expanded(ids, mask, digests)
        examples.append(Example(row["id"], (ids,), (_after_first(mask),), images=(placed,)))
    return examples


def document_examples(tokenizer: PreTrainedTokenizerFast, row: Row, max_length: int) -> list[Example]:
    """Cut a document of BOS (if the tokenizer has one), text, EOS into pieces of at most `max_length` tokens.

    A piece starts with the last token of the one before it, as context only: so every token is trained exactly once,
    and no EOS is taught where a document continues.
    """
    ids = encode_text(tokenizer, row["text"])
    pieces = [ids[start : start + max_length] for start in range(0, len(ids) - 1, max(max_length - 1, 1))]
    return [Example(row["id"], (piece,), (_after_first([True] * len(piece)),)) for piece in pieces]


def _after_first(mask: Sequence[bool]) -> list[bool]:
    """Clear the mask's first token, which nothing predicts."""
    return [False, *mask[1:]]


def pack_sequences(examples: Sequence[Example], processor: ImageProcessor | None = None) -> PackedBatch:
    """Pack examples. processor: of the model, if examples have images."""
    batch = pack([e.sequences[0] for e in examples], [e.masks[0] for e in examples])
    return with_images(batch, images_of_each(examples), processor)


class LanguageModelWorker(PolicyWorker[SupervisedConfig]):
    """SFT (full weights or LoRA) and pre-training."""

    def loss(
        self, model: nn.Module, batch: PackedBatch, shard: Shard, step_routing: Tensor | None = None
    ) -> LossAndMetrics:
        """Return the loss.

        step_routing: of the experts over the whole step; with it, the micro-batch's load is balanced too.
        """
        logprobs, _, routing = model(batch, only=batch.loss_mask, with_routing=step_routing is not None)
        loss = next_token_loss(logprobs, batch.loss_mask, num_tokens=shard.num_tokens)
        return self.balanced(loss, {}, routing, step_routing)
