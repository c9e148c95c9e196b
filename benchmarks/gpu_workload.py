"""The workload of `benchmarks.gpu`: model shape, sequences, and FLOPs of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_core.losses.aggregation import loss_weights
from rlhf_core.models.token_tree import TokenTree
from rlhf_core.packing import pack
from rlhf_core.types import Minibatch, PackedBatch


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts of a step with completions of each, all of the same lengths in tokens."""

    prompts: int
    prompt: int
    completions: int
    completion: int


@dataclass(frozen=True, slots=True)
class Scale:
    """A model's shape and the tokens of a micro-batch."""

    config: Mapping[str, Any]  # of transformers' Qwen3Config
    sequence: int  # tokens of a sequence of SFT
    short: int
    long: int
    rl: Group  # of `long` tokens
    grpo: Group


QWEN3 = Scale(
    config={
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
    },
    sequence=1024, short=8192, long=16_384, rl=Group(4, 256, 4, 768), grpo=Group(8, 2048, 8, 256),
)  # fmt: skip
TINY = Scale(
    config={
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
    },
    sequence=32, short=128, long=256, rl=Group(2, 16, 4, 16), grpo=Group(2, 32, 4, 8),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens and FLOPs of a step."""

    tokens: int  # of all sequences
    computed: int  # of these, those that the model computes
    flops: float


def sequences(scale: Scale, group: Group) -> PackedBatch:
    """Return random prompts with completions, which are trained."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, 3, scale.config["vocab_size"], generator=generator)
    ids = []
    for _ in range(group.prompts):
        prompt = draw((group.prompt,))
        ids += [torch.cat([prompt, draw((group.completion,))]) for _ in range(group.completions)]
    return pack(ids, [torch.arange(len(sequence)) >= group.prompt for sequence in ids])


def unrelated(scale: Scale, tokens: int) -> PackedBatch:
    """Return `tokens` in sequences without prompts."""
    return sequences(scale, Group(tokens // scale.sequence, 0, 1, scale.sequence))


def work(scale: Scale, batch: PackedBatch, *, tree: bool, passes: tuple[float, float]) -> Work:
    """Return the cost of a step on `batch`.

    passes: the number of forward-equivalent passes of backbone and head; the backward of trained weights counts 2, of
    frozen ones 1.
    """
    c = scale.config
    layers, heads = c["num_hidden_layers"], c["num_attention_heads"] * c["head_dim"]
    attention = 2 * c["hidden_size"] * (heads + c["num_key_value_heads"] * c["head_dim"])
    weights = layers * (attention + 3 * c["hidden_size"] * c["intermediate_size"])
    lengths = batch.sequence_lengths.double()
    pairs = float((lengths * lengths).sum()) / 2  # of queries and keys, those that causal attention looks at
    computed = batch.num_tokens
    if tree:
        grown = TokenTree.of(batch)
        computed = len(grown.kept)
        pairs = sum(
            float((group.real.sum(1).double() * (group.keys.shape[1] - group.queries.shape[1] / 2)).sum())
            for group in grown.plan.groups
        )
    backbone = 2 * weights * computed + 4 * heads * layers * pairs
    head = 2 * c["hidden_size"] * c["vocab_size"] * batch.num_trained_tokens
    return Work(batch.num_tokens, computed, passes[0] * backbone + passes[1] * head)


def minibatch(batch: PackedBatch, old: Tensor | None = None) -> Minibatch:
    advantages = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)) * batch.loss_mask
    weights = loss_weights(batch.loss_mask, batch.sequence_lengths, "sequence", length=1)
    return Minibatch(
        **vars(batch), rollout_logprobs=torch.zeros(batch.num_tokens), advantages=advantages, loss_weights=weights,
        old_logprobs=old,
    )  # fmt: skip
