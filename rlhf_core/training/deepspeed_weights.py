"""Reading and replacing the weights of a DeepSpeed engine, one full weight at a time, under any sharding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.models.sharded_loading import full_shape
from rlhf_core.models.stored import saved_weights, stored_groups, stored_state
from rlhf_core.models.tensor_parallel import cut_of, whole
from rlhf_core.training.deepspeed_settings import import_deepspeed
from rlhf_core.training.divided import DividedTensors


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def stored_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each full tensor of `model`'s folder, valid until the next one. Every rank must consume all."""
    live = saved_weights(model)
    for names in stored_groups(model, live):
        with _gathered([live[name] for name in names]):
            yield from stored_state(model, {name: whole(live[name]) for name in names}).items()


def _gathered(tensors: Sequence[Tensor], *, modified: bool = False) -> AbstractContextManager[Any]:
    """Gather the tensors that ZeRO 3 has partitioned on all ranks, within the context.

    modified: divide what is in them at exit, which must be equal on all ranks.
    """
    sharded = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    gathered = import_deepspeed().zero.GatheredParameters
    return gathered(sharded, modifier_rank=0 if modified else None) if sharded else nullcontext()


@torch.no_grad()
def master_weights(model: nn.Module, *, zero_stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each trained weight in float32, the master weight if there is one. Every rank must consume all."""
    deepspeed = import_deepspeed()
    for name, parameter in trained_parameters(model).items():
        value = parameter if zero_stage == 0 else deepspeed.utils.safe_get_full_fp32_param(parameter)
        cut = cut_of(parameter)
        yield name, (value.detach() if cut is None else cut.whole(value.detach())).float()


@contextmanager
def replaced(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Replace the trained weights by `weights` within the context, and restore them at exit.

    weights: as of `master_weights`, whole and equal on every rank. Master weights and optimizer state are not replaced:
    nothing may be trained meanwhile. Every rank must enter.
    """
    parameters = trained_parameters(model)
    previous = DividedTensors({n: p.new_empty(full_shape(p), device="meta") for n, p in parameters.items()})
    for (name, parameter), (given, value) in zip(parameters.items(), weights, strict=True):
        if name != given:
            raise ValueError(f"{given} was given in the place of {name}")
        _exchange(parameter, value, previous.own.get(name))
    try:
        yield
    finally:
        for name, value in previous:
            _exchange(parameters[name], value, None)


@torch.no_grad()
def _exchange(parameter: Any, value: Tensor, before: Tensor | None) -> None:
    """Set the parameter to the whole `value`, equal on all ranks; copy what it was to `before`."""
    if (cut := cut_of(parameter)) is not None:
        exchanged = cut.whole(parameter.detach())
        if before is not None:
            before.copy_(exchanged)
        parameter.copy_(cut.part(value))
        return
    with _gathered([parameter], modified=True):
        if before is not None:
            before.copy_(parameter.detach())
        parameter.copy_(value)
