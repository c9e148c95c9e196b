"""Reading and replacing the weights of a DeepSpeed engine, one full weight at a time, under any sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.models.stored import saved_weights, stored_groups, stored_state
from rlhf_core.models.tensor_parallel import cut_of, whole
from rlhf_core.training.deepspeed_settings import import_deepspeed


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def stored_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each full tensor of `model`'s folder, valid until the next one. Every rank must consume all."""
    live = saved_weights(model)
    for names in stored_groups(model, live):
        with _gathered([live[name] for name in names]):
            yield from stored_state(model, {name: whole(live[name]) for name in names}).items()


def _gathered(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Gather the tensors that ZeRO 3 has partitioned on all ranks, within the context."""
    sharded = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    return import_deepspeed().zero.GatheredParameters(sharded) if sharded else nullcontext()


@torch.no_grad()
def master_weights(model: nn.Module, *, zero_stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each trained weight in float32, the master weight if there is one. Every rank must consume all."""
    deepspeed = import_deepspeed()
    for name, parameter in trained_parameters(model).items():
        value = parameter if zero_stage == 0 else deepspeed.utils.safe_get_full_fp32_param(parameter)
        cut = cut_of(parameter)
        yield name, (value.detach() if cut is None else cut.whole(value.detach())).float()


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Replace the trained weights by `weights` (rank 0's; None on others) within the context, and restore them at exit.

    Master weights and optimizer state are not replaced: nothing may be trained meanwhile. Every rank must enter.
    """
    previous = {
        name: _exchange(p, None if weights is None else weights[name]) for name, p in trained_parameters(model).items()
    }
    try:
        yield
    finally:
        for name, parameter in trained_parameters(model).items():
            _exchange(parameter, previous[name])


@torch.no_grad()
def _exchange(parameter: Any, value: Tensor | None) -> Tensor | None:
    """Set the parameter to `value` (rank 0's) on all ranks; returns its previous value on rank 0."""
    if (cut := cut_of(parameter)) is not None:
        exchanged = cut.whole(parameter.detach())
        before = exchanged.cpu().clone() if dist.get_rank() == 0 else None
        if value is not None:
            exchanged.copy_(value)
        dist.broadcast(exchanged, src=0)
        parameter.copy_(cut.part(exchanged))
        return before
    sharded = hasattr(parameter, "ds_id")
    with import_deepspeed().zero.GatheredParameters([parameter], modifier_rank=0) if sharded else nullcontext():
        before = parameter.detach().cpu().clone() if dist.get_rank() == 0 else None
        if value is not None:
            parameter.copy_(value)
    if not sharded and dist.get_world_size() > 1:
        dist.broadcast(parameter.data, src=0)
    return before
