"""Synthetic Llamas whose tokens are words: the models of the benchmarks against TRL.

Importing this loads no torch: the process of a reward function reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, USER, ASSISTANT, EOS = SPECIAL_TOKENS = ("<pad>", "<bos>", "<user>", "<assistant>", "<eos>")
TEMPLATE = (
    "<bos>{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama; embedding and head are tied. On CPU vLLM serves attention heads of size 32 and 64, among others."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int


SHAPES = {
    "1m": Shape(1024, 128, 344, 4, 4, 4),
    "25m": Shape(12288, 512, 1376, 6, 8, 8),
    "135m": Shape(49152, 576, 1536, 30, 9, 3),  # SmolLM2-135M
}


def word_ids(vocabulary: int) -> range:
    """Return the tokens of words, `w4` and so on: all but the special ones."""
    return range(len(SPECIAL_TOKENS) - 1, vocabulary - 1)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word; EOS is the last of `vocabulary`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS[:-1], *(f"w{i}" for i in word_ids(vocabulary)), EOS]
    word_level = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=PAD))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=word_level, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=PAD,
        additional_special_tokens=[USER, ASSISTANT], model_max_length=CONTEXT,
    )  # fmt: skip
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(shape: Shape, folder: Path, *, ends_after: int | None = None) -> int:
    """Write a folder that transformers loads, in float32, with the tokenizer; return the number of parameters.

    ends_after: mean tokens of a sampled completion; 0: it never ends; None: as by its random weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=shape.vocabulary - 1,
    ))  # fmt: skip
    if ends_after is not None:
        _end_after(model, ends_after)
    model.save_pretrained(folder)
    tokenizer(shape.vocabulary).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _end_after(model: Any, tokens: int) -> None:
    """Give EOS the same probability after any words: 1 in `tokens`, or e to the -20 where that is 0.

    One coordinate of the residual stream is a large constant: that of every token's embedding. The head, which shares
    the embedding, reads it with one sign for every word, and only it for EOS. If completions end, the other
    coordinates are so small that all words are about as likely: repeated words would change the probability of EOS.
    """
    import torch

    embedding = model.get_input_embeddings().weight.data
    embedding[:, 0] = constant = 16 / embedding.shape[1] ** 0.5
    embedding[-1] = 0.0
    embedding[-1, 0] = -constant
    if tokens:
        embedding[:, 1:] *= 0.1
        generator = torch.Generator().manual_seed(0)
        words = word_ids(len(embedding))
        ids = torch.randint(words.start, words.stop, (16, 64), generator=generator)
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[:, 8:].flatten(0, 1)
            others = (hidden @ embedding[:-1].T).logsumexp(-1)
        # p = e^x / (e^x + e^others), x = hidden_0 times the unknown weight; both hardly depend on the words.
        embedding[-1, 0] = ((others - math.log(tokens - 1)) / hidden[:, 0]).mean()
