"""The state that an engine's next step depends on, as named tensors.

The tensors are live: a checkpoint copies them out, a restored run copies them in, in place, so that DeepSpeed's views
and buckets of them stay valid. Frozen weights, such as the base of a LoRA model, are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhf_core.errors import StageError
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine, StepCounters

_COUNTERS = "counters"


@dataclass(frozen=True)
class RankState:
    """Tensors of one rank by name. `shared`: equal on all ranks, so that rank 0's serve them all."""

    shared: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)


class Stateful(Protocol):
    """A part of a rank that the next step depends on."""

    def state(self) -> RankState:
        """References to the live tensors; non-tensor state is encoded as new tensors."""

    def load_state(self, state: RankState) -> None:
        """Load `state`, tensors on the CPU. Every rank must call it. Raises StageError if it does not fit."""


class EngineState:
    """Weights, buffers, master weights, optimizer state and counters of an engine that trains.

    Under ZeRO 1 and 2 every rank has the whole weights, and its partition of the rest; under ZeRO 3 a partition of all;
    without ZeRO, everything is equal on all ranks.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    def state(self) -> RankState:
        counters = {_COUNTERS: torch.tensor(astuple(self._engine.counters))}
        live = self._live()
        return RankState(counters | live.shared, live.own)

    def load_state(self, state: RankState) -> None:
        saved = {**state.shared, **state.own}
        counters: list[int] = saved.pop(_COUNTERS).tolist()
        self._create_optimizer_state(saved)
        live = self._live()
        copy_into({**live.shared, **live.own}, saved)
        self._engine.counters = StepCounters(*counters)
        # Under ZeRO 3, small weights stay gathered between steps: they are gathered again from the restored partitions.
        cut: list[Any] = [parameter for parameter in self._engine.module.parameters() if _is_cut(parameter)]
        gathered = [parameter for parameter in cut if parameter.ds_status.name == "AVAILABLE"]
        if gathered:
            gathered[0].partition(gathered)
            gathered[0].all_gather(gathered)

    def _live(self) -> RankState:
        module = self._engine.module
        weights = dict(_weights(module))
        optimizer = {
            f"optimizer.{i}.{name}": value
            for i, parameter in enumerate(self._optimized())
            for name, value in self._optimizer.state.get(parameter, {}).items()
        }
        if not self._is_sharded:
            return RankState(shared=weights | optimizer)
        masters = {f"master.{i}": parameter.data for i, parameter in enumerate(self._optimized())}
        if any(map(_is_cut, module.parameters())):
            return RankState(own=weights | masters | optimizer)
        return RankState(shared=weights, own=masters | optimizer)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self._engine.optimizer is not None
        return self._engine.optimizer

    @property
    def _is_sharded(self) -> bool:
        return self._engine.zero_optimizer is not self._engine.optimizer

    def _optimized(self) -> list[Tensor]:
        """The parameters of the optimizer: the weights themselves, or this rank's partitions of the master weights."""
        if any(map(_is_cut, self._engine.module.parameters())):
            # The optimizer has each of these in its groups only while it steps it.
            return list(self._engine.zero_optimizer.fp32_partitioned_groups_flat)
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _create_optimizer_state(self, saved: Mapping[str, Tensor]) -> None:
        """An optimizer has no state before its first step: create empty tensors for all saved ones."""
        for i, parameter in enumerate(self._optimized()):
            prefix = f"optimizer.{i}."
            for name, tensor in saved.items():
                if name.startswith(prefix):
                    # torch's optimizers keep scalars, such as the number of steps, on the CPU, except fused ones.
                    on_device = tensor.ndim or self._optimizer.defaults["fused"]
                    empty = torch.empty_like(tensor, device=parameter.device if on_device else "cpu")
                    self._optimizer.state[parameter].setdefault(name.removeprefix(prefix), empty)


def copy_into(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `saved` into the one of `live` with its name. Raises StageError unless they fit exactly."""
    advice = "it was written with other settings; set them back, or set checkpoint.resume to false"
    for name in sorted(live.keys() ^ saved.keys()):
        where = "is in this run, but not in the checkpoint" if name in live else "is in the checkpoint, not in this run"
        raise StageError(f"`{name}` {where}: {advice}")
    for name, tensor in live.items():
        ours, theirs = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, saved[name]))
        if ours != theirs:
            raise StageError(f"`{name}` is {theirs} in the checkpoint and {ours} in this run: {advice}")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Trained weights (under ZeRO 3, this rank's partitions), and all buffers of the model's state dict."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield f"weight.{name}", getattr(parameter, "ds_tensor", parameter).data
    kept = set(module.state_dict(keep_vars=True))
    yield from ((f"buffer.{name}", buffer) for name, buffer in module.named_buffers() if name in kept)


def _is_cut(parameter: nn.Parameter) -> bool:
    """Whether ZeRO 3 has partitioned it."""
    return hasattr(parameter, "ds_id")
