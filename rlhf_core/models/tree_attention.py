"""Attention along the branches of a token tree, as an implementation of transformers' attention interface.

Projections, norms and MLP see the tree's tokens in one row. Attention alone is by segments: each has its own keys and
those of the tokens before it, and segments of similar size share a call. So there is no mask over a whole row:
transformers makes none for an implementation that is registered for attention alone. The tree is an argument of every
call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_core.models.token_tree import TokenTree

IMPLEMENTATION = "token_tree"
ARGUMENT = "token_tree"  # of a forward of the model, which hands it down to its layers
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias", "head_mask")
_windows: list[int | None] | None = None  # of the calls so far, where they are recorded


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    token_tree: TokenTree | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Of the n tokens of a tree. query: (1, H, n, d); key: (1, G, n, d), G divides H; value: (1, G, n, e).

    Returns (1, n, H, e). Raises NotImplementedError for what it is asked beside that, instead of leaving it out.
    """
    if token_tree is None or attention_mask is not None or query.shape[0] != 1:
        raise NotImplementedError("attention in a token tree is for one row of tokens with its tree, and no mask")
    if asked := [name for name in _NOT_COMPUTED if others.get(name) is not None]:
        raise NotImplementedError(f"attention in a token tree does not compute {', '.join(asked)}")
    if _windows is not None:
        _windows.append(sliding_window)
    found = []
    by_token = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]  # (n, heads, size)
    for group in token_tree.groups:
        places = (group.queries, group.keys, group.keys)
        queries, keys, values = (_gathered(part, each) for part, each in zip(by_token, places, strict=True))
        bias = group.bias(sliding_window, query.dtype)
        result = scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, dropout_p=dropout, is_causal=bias is None, scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )  # fmt: skip
        found.append(result.transpose(1, 2).flatten(0, 1).index_select(0, group.taken))  # (tokens, H, e)
    return torch.cat(found).index_select(0, token_tree.order).unsqueeze(0), None


def _gathered(values: Tensor, places: Tensor) -> Tensor:
    """(g, H, t, d) of (n, H, d) at places (g, t). The backward pass of other ways to index takes longer."""
    gathered: Tensor = values.index_select(0, places.flatten()).unflatten(0, places.shape)
    return gathered.transpose(1, 2)


def use_tree_attention(model: Any) -> None:
    """Of a PreTrainedModel, from here on. Its forward then takes a tree as ARGUMENT, and nothing else."""
    from transformers import AttentionInterface  # not at the top: drivers, which run no model, load without it

    AttentionInterface.register(IMPLEMENTATION, tree_attention)
    model.set_attn_implementation(IMPLEMENTATION)


@contextmanager
def recorded_windows() -> Iterator[list[int | None]]:
    """The sliding window of each call of `tree_attention` inside."""
    global _windows
    windows: list[int | None] = []
    _windows = windows
    try:
        yield windows
    finally:
        _windows = None
