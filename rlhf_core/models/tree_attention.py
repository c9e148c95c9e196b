"""Attention along the branches of a token tree, as an implementation of transformers' attention interface.

Projections, norms and MLP process the tree's tokens in one row. Only attention is by segments: each has its own keys
and those of the tokens before it, and segments of similar size share a call. So there is no mask over a whole row:
transformers makes none for an implementation that is registered for attention only. The tree is an argument of every
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_core.models.sequence_parallel import CutTree
from rlhf_core.models.token_tree import AttentionPlan, TokenTree

IMPLEMENTATION = "token_tree"
ARGUMENT = "token_tree"  # of a forward of the model, which hands it down to its layers
_NOT_COMPUTED = ("s_aux", "position_bias", "head_mask")
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
    token_tree: TokenTree | CutTree | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of the n tokens of a tree, or of this rank's part of them, of which then every rank calls it.

    query: (1, H, n, d); key: (1, G, n, d), G divides H; value: (1, G, n, e). Returns (1, n, H, e). Raises
    NotImplementedError for unsupported arguments, instead of ignoring them.
    """
    if token_tree is None or attention_mask is not None or query.shape[0] != 1:
        raise NotImplementedError("attention in a token tree is for one row of tokens with its tree, and no mask")
    if unsupported := not_computed(others, "softcap"):
        raise NotImplementedError(f"attention in a token tree does not compute {', '.join(unsupported)}")
    record_window(sliding_window)
    attend = partial(_attend, dropout=dropout, scaling=scaling, window=sliding_window)
    if isinstance(token_tree, CutTree):
        return token_tree.attention(attend, query, key, value), None
    return attend(query, key, value, token_tree.plan), None


def not_computed(others: Mapping[str, Any], *more: str) -> list[str]:
    """Return which of a call's further arguments would be ignored: those that no implementation of ours computes, and
    `more`.
    """
    return [name for name in (*more, *_NOT_COMPUTED) if others.get(name) is not None]


def record_window(window: int | None) -> None:
    """Note the sliding window of a call where `recorded_windows` asks for it."""
    if _windows is not None:
        _windows.append(window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attention of the tokens of `plan` alone. query: (1, H, q, d); the result: (1, q, H, e)."""
    parts = [
        _gathered(query, plan.queries, [group.queries.shape for group in plan.groups]),
        _gathered(key, plan.keys, [group.keys.shape for group in plan.groups]),
        _gathered(value, plan.keys, [group.keys.shape for group in plan.groups]),
    ]
    outputs = []
    for group, queries, keys, values in zip(plan.groups, *parts, strict=True):
        bias = group.bias(window, query.dtype)
        result = scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, dropout_p=dropout, is_causal=bias is None, scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )  # fmt: skip
        outputs.append(result.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.order).unsqueeze(0)


def _gathered(values: Tensor, places: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Gather (1, H, n, d) into (g, H, t, d) for each shape (g, t) of a group.

    For all groups at once: the gradient of a gather begins with zeros for all n tokens. squeeze and index_select, since
    the gradient of other ways to index takes longer.
    """
    gathered = values.squeeze(0).transpose(0, 1).contiguous().index_select(0, places)
    parts = gathered.split([shape.numel() for shape in shapes])
    return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def use_tree_attention(model: Any) -> None:
    """Set the attention of a PreTrainedModel. Its forward then takes a tree as ARGUMENT, and nothing else."""
    from transformers import AttentionInterface  # not at the top: drivers, which run no model, load without it

    AttentionInterface.register(IMPLEMENTATION, tree_attention)
    model.set_attn_implementation(IMPLEMENTATION)


def keep_from_compilation() -> None:
    """Exclude it from compilation in models with compiled layers: its calls depend on the tree."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(tree_attention))


@contextmanager
def recorded_windows() -> Iterator[list[int | None]]:
    """Record the sliding window of each call of `tree_attention`, or `flex_attention.flex`, inside."""
    global _windows
    windows: list[int | None] = []
    _windows = windows
    try:
        yield windows
    finally:
        _windows = None
