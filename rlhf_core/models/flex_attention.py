"""FlexAttention as an implementation of transformers' attention interface: one call for a whole row of tokens.

The row is a token tree, sequences end to end, or padded rows one after the other; TreeBlocks says which keys a token
sees. The mask is made once for all layers of a micro-batch. On CUDA torch compiles the call, once for each size of a
row, hence the padding. Elsewhere it computes all scores at once, and on CPUs it has no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad

from rlhf_core.errors import StageError
from rlhf_core.models.compiling import set_up_compilation
from rlhf_core.models.folders.attention_names import attention_problem, attentions_of
from rlhf_core.models.folders.vision_models import reads_images
from rlhf_core.models.token_tree import Segment
from rlhf_core.models.tree_attention import not_computed, record_window
from rlhf_core.models.tree_blocks import TreeBlocks

IMPLEMENTATION = "flex"  # in transformers, and the value of engine.attention
# For each size of a row, with gradients and without, for each window and shape of heads. Rows of at most 16,384 tokens
# have 24 sizes.
_MOST_GRAPHS = 256

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    token_tree: TreeBlocks | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of the tokens of `token_tree`, in one row, or of rows that each are one sequence, padded at its end.

    query: (B, H, T, d); key: (B, G, T, d), G divides H; value: (B, G, T, e). softcap: c of c tanh(score / c). Returns
    (B, T, H, e). Raises StageError for what it does not compute, and NotImplementedError for a mask.
    """
    rows, _, length, _ = query.shape
    if attention_mask is not None or (token_tree is not None and (rows, length) != (1, token_tree.length)):
        raise NotImplementedError("flex attention is for one row of tokens with its tree, or sequences, and no mask")
    if unsupported := not_computed(others):
        raise StageError(f"engine.attention: flex does not compute {', '.join(unsupported)} of this model; set sdpa")
    if dropout:
        raise StageError(
            f"engine.attention: flex has no dropout, but the model's config has {dropout:g} in its attention; set it "
            "to 0 there, or engine.attention: sdpa"
        )
    record_window(sliding_window)
    blocks = _separate(rows, length, query.device) if token_tree is None else token_tree
    parts = [_in_one_row(part, blocks.size) for part in (query, key, value)]
    attend = cast(Callable[..., Tensor], _compiled() if query.is_cuda else flex_attention)
    output = attend(
        *parts, score_mod=None if softcap is None else _capped(softcap), block_mask=blocks.mask(sliding_window),
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output[0, :, : rows * length].transpose(0, 1).unflatten(0, (rows, length)), None


def _in_one_row(states: Tensor, size: int) -> Tensor:
    """Return (B, H, T, d) as (1, H, size, d), the rows one after the other."""
    row = states if len(states) == 1 else states.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    return pad(row, (0, 0, 0, size - row.shape[2])) if row.shape[2] < size else row


@lru_cache(maxsize=8)
def _separate(rows: int, length: int, device: torch.device) -> TreeBlocks:
    nothing = torch.empty(0, dtype=torch.int64)
    return TreeBlocks([Segment(row * length, length, nothing) for row in range(rows)], device)


@cache
def _capped(softcap: float) -> ScoreFunction:
    """One function for each cap: another would be compiled again."""

    def capped(score: Tensor, _sequence: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _compiled() -> Callable[..., Tensor]:
    # For fixed sizes, of which padding leaves few: code for any size is slower.
    compiled: Callable[..., Tensor] = torch.compile(
        flex_attention, dynamic=False, options=set_up_compilation(_MOST_GRAPHS)
    )
    return compiled


def use_flex_attention(model: Any) -> None:
    """Set the attention of a PreTrainedModel. Raises StageError for a class without it."""
    from transformers import AttentionInterface  # not at the top: drivers, which run no model, load without it

    kind = type(model)
    if (problem := attention_problem(kind.__name__, attentions_of(kind), IMPLEMENTATION)) is not None:
        raise StageError(problem)
    if reads_images(model.config.to_dict()):
        raise StageError(f"engine.attention: flex was not tested with models that read images; {kind.__name__} does; "
                         "set sdpa")  # fmt: skip
    AttentionInterface.register(IMPLEMENTATION, flex)
    model.set_attn_implementation(IMPLEMENTATION)
