"""Comparison of a loaded model's attention implementation with the model's own eager attention.

Implementations of transformers' attention interface accept any argument and ignore unknown ones: `sdpa` accepts Gemma
2's `softcap` and ignores it. So one call of each layer is compared with the eager function of the model's module, in
float32 and with scores that are large enough for a soft cap to matter. Layers that do not use the interface have one
attention only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from rlhf_core.models.flex_attention import flex
from rlhf_core.models.output_head import backbone

Attention = Callable[..., tuple[Tensor, Any]]

_LARGEST_SCORE = 60.0
_MOST_DIFFERENCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.05}  # relative, by the keys' dtype


def attention_difference(model: Any, ids: Tensor) -> str | None:
    """Return the difference of the attention of `model` from its eager one, such as "leaves out softcap"; None if
    equal.

    model: a PreTrainedModel in eval mode. ids: (1, T) int64, on its device.
    """
    if model.config._attn_implementation == "eager":
        return None
    differences: list[str] = []

    def compared(own: Attention, eager: Attention) -> Attention:
        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
        ) -> tuple[Tensor, Any]:
            if not differences and (difference := _difference(own, eager, module, (query, key, value), options)):
                differences.append(difference)
            return own(module, query, key, value, attention_mask, **options)

        return attention

    with torch.no_grad(), _wrapped_attention(compared):
        backbone(model)(input_ids=ids, use_cache=False)
    return differences[0] if differences else None


@contextmanager
def _wrapped_attention(wrap: Callable[[Attention, Attention], Attention]) -> Iterator[None]:
    """Make layers call `wrap(own, eager)` inside, instead of their own attention."""
    from transformers import AttentionInterface  # not at the top: drivers, which run no model, load without it

    interface: Any = AttentionInterface
    chosen = interface.get_interface

    def get_interface(self: Any, implementation: str, default: Attention) -> Attention:
        own: Attention = chosen(self, implementation, default)
        return own if own is default else wrap(own, default)

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = chosen


def _difference(
    own: Attention, eager: Attention, module: Any, states: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
) -> str | None:
    """Compare both on one call. states: query, key and value, (1, heads, T, d) each."""
    query, key, value = (state.float() for state in states)
    scores = query[:, 0] @ key[:, 0].transpose(1, 2) * (options.get("scaling") or query.shape[-1] ** -0.5)
    query = query * (_LARGEST_SCORE / scores.abs().max().clamp_min(1e-30))
    length = query.shape[2]
    causal = torch.full((length, length), torch.finfo(torch.float32).min, device=query.device).triu(1)[None, None]
    if module.config._attn_implementation.startswith("flash"):  # which computes in 16 bits, and makes its own mask
        dtype = states[1].dtype
        query, key, value = (state.to(dtype) for state in (query, key, value))
        output = own(module, query, key, value, None, **options)[0].float()
        query, key, value = query.float(), key.float(), value.float()
    else:
        dtype = torch.float32
        if own is flex and (window := options.get("sliding_window")) is not None:  # which makes its own mask too
            causal += torch.full_like(causal, torch.finfo(torch.float32).min).tril(-window)
        output = own(module, query, key, value, None if own is flex else causal, **options)[0]

    def equal(kwargs: dict[str, Any]) -> bool:
        wanted = eager(module, query, key, value, causal, **kwargs)[0]
        return bool((output - wanted).norm() <= _MOST_DIFFERENCE[dtype] * wanted.norm())

    if equal(options):
        return None
    unknown = options.keys() - signature(own).parameters.keys()  # it takes these by **kwargs
    dropped = next((n for n in sorted(unknown) if equal({k: v for k, v in options.items() if k != n})), None)
    return "computes something else than the model's eager attention" if dropped is None else f"leaves out {dropped}"
