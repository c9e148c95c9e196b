"""Offload of a DeepSpeed engine's tensors to host memory and back, while others use the device of a training rank.

DeepSpeed moves the flat buffers of ZeRO 1 and 2. The rest is moved here: DeepSpeed's ZeRO 3 moves master weights and
optimizer state for its own Adam only, and treats its weight buffer as all weights in the model's order, although it
holds the trained ones in the optimizer's order; no stage moves frozen weights. Tensors that the settings keep in host
memory stay there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlhf_core.training.deepspeed_settings import import_deepspeed


def offload_states(engine: Any) -> list[Tensor]:
    """Move the tensors that outlive a step to host memory; returns those to pass to `reload_states`.

    engine: DeepSpeed's, or the bare module of a model that is neither trained nor sharded. Every rank must call it.
    """
    zero = _zero_stage(engine)
    with _gc_frozen():
        if zero == 3:
            engine.empty_partition_cache()
        if zero and _is_trained(engine):
            engine.offload_states(include=_states_of_deepspeed(zero), pin_memory=torch.cuda.is_available())
    if zero == 3 and _is_trained(engine):
        _move_partitions(engine.optimizer, _in_host_memory(engine.optimizer.lp_param_buffer))
    # Tensors shared by two engines are moved, and moved back, by the first to offload.
    moved = [tensor for tensor in _other_tensors(engine, zero) if tensor.device.type != "cpu"]
    for tensor in moved:
        tensor.data = _in_host_memory(tensor)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return moved


def reload_states(engine: Any, moved: list[Tensor], device: torch.device) -> None:
    """Undo `offload_states`, which returned `moved`. Every rank must call it."""
    for tensor in moved:
        tensor.data = tensor.data.to(device, non_blocking=True)
    zero = _zero_stage(engine)
    if zero and _is_trained(engine):
        if zero == 3:
            _move_partitions(engine.optimizer, engine.optimizer.lp_param_buffer.data.to(device))
        engine.reload_states()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which DeepSpeed runs at every move: a second or more."""
    if _is_preloaded():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@cache
def _is_preloaded() -> bool:
    """True in a fork of a process that froze what it had loaded, whose memory `gc.unfreeze` would have copied."""
    return gc.get_freeze_count() > 0


def _is_deepspeed(engine: Any) -> bool:
    return hasattr(engine, "zero_optimization_stage")


def _zero_stage(engine: Any) -> int:
    return int(engine.zero_optimization_stage()) if _is_deepspeed(engine) else 0


def _is_trained(engine: Any) -> bool:
    return hasattr(engine.optimizer, "param_groups") and not _only_partitions(engine)


def _only_partitions(engine: Any) -> bool:
    """True if the engine is ZeRO 3 around a frozen model: without optimizer, only with hooks that gather weights."""
    import_deepspeed()
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    return isinstance(engine.optimizer, DeepSpeedZeRoOffload)


def _states_of_deepspeed(zero: int) -> list[Any]:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

    if zero == 3:
        return [States.lp_grads, States.contiguous_grad_buffer]
    return [States.hp_params, States.lp_params, States.lp_grads]


def _move_partitions(zero: Any, buffer: Tensor) -> None:
    """Make `buffer` the storage of this rank's ZeRO 3 partitions of the trained weights, and update their views."""
    zero.lp_param_buffer.data = buffer
    zero.fp16_partitioned_groups_flat.clear()
    start = 0
    for group in zero.fp16_groups:
        first = start
        for parameter in group:
            parameter.ds_tensor.data = buffer.narrow(0, start, parameter.ds_tensor.numel())
            start += parameter.ds_tensor.numel()
        zero.fp16_partitioned_groups_flat.append(buffer.narrow(0, first, start - first))


def _other_tensors(engine: Any, zero: int) -> Iterator[Tensor]:
    """Yield the tensors that have no other views, and so can be moved one by one."""
    module = engine.module if _is_deepspeed(engine) else engine
    yield from module.buffers()
    for parameter in module.parameters():
        if zero == 3 and not (parameter.requires_grad and _is_trained(engine)):
            yield parameter.ds_tensor
        elif zero == 0 or (zero < 3 and not parameter.requires_grad):
            yield parameter
    if not _is_deepspeed(engine) or not _is_trained(engine) or engine.zero_use_cpu_optimizer():
        return
    optimizer = engine.optimizer if zero == 0 else engine.optimizer.optimizer
    masters = engine.optimizer.fp32_partitioned_groups_flat if zero == 3 else []
    state = (value for values in optimizer.state.values() for value in values.values())
    yield from chain(masters, (value for value in state if isinstance(value, Tensor) and value.ndim))


def _in_host_memory(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor.data, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor.data)
