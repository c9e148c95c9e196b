"""Gradient checkpointing: recomputation of layers in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rlhf_core.config.engines.training import GradientCheckpointing
from rlhf_core.errors import StageError

_aten = torch.ops.aten
# The expensive operators of a layer; `_grouped_mm` is of experts. All others read and write their inputs once.
_KEPT = frozenset({
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._grouped_mm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default,
})  # fmt: skip


def checkpoint_layers(model: transformers.PreTrainedModel, kind: GradientCheckpointing) -> None:
    """Make each layer of `model` keep only its input and, if `selective`, the results of products and attention.

    Raises StageError for an unsupported model.
    """
    if not kind:
        return
    if not model.supports_gradient_checkpointing:
        raise StageError(
            f"engine.gradient_checkpointing: transformers cannot compute layers of {type(model).__name__} again; "
            "remove it"
        )
    options: dict[str, Any] = {"use_reentrant": False}  # re-entrant, ZeRO would reduce a shared gradient twice
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _policy(context: object, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keep results of products and attention; operators that are not torch's own are kernels of libraries, such as
    flash attention: kept too. Collectives write into a tensor, whose memory they would not fill again.
    """
    kept = operator in _KEPT or operator.namespace not in ("aten", "c10d")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
