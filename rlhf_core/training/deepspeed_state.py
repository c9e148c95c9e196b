"""The state that the next step of a DeepSpeed engine depends on, as named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.models.tensor_parallel import shard_of
from rlhf_core.training.deepspeed_layouts import cut_in_flat_parts, cut_together
from rlhf_core.training.state import Layout, Piece, RankState, copy_into


@dataclass(frozen=True, slots=True)
class DeepSpeedState:
    """Weights, buffers, master weights and optimizer state. Every rank must call every method."""

    _module: nn.Module
    _optimizer: torch.optim.Optimizer
    _zero: Any  # DeepSpeed's wrapper of `_optimizer`, which has the partitions; `_optimizer` itself at ZeRO 0

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copy `saved` into the live tensors. Raises StageError unless names, shapes and dtypes are equal."""
        self._create_optimizer_state(saved)
        live = self.live()
        copy_into({**live.shared, **live.own}, saved)
        # Under ZeRO 3, small weights stay gathered between steps: gather them again from the restored partitions.
        partitioned: list[Any] = [parameter for parameter in self._module.parameters() if _is_partitioned(parameter)]
        gathered = [parameter for parameter in partitioned if parameter.ds_status.name == "AVAILABLE"]
        if gathered:
            gathered[0].partition(gathered)
        if hasattr(self._zero, "invalidate_secondary_tensor"):
            self._zero.invalidate_secondary_tensor()  # hpZ's copy, from a forward before, of what the weights were
        if gathered:
            gathered[0].all_gather(gathered)

    def live(self) -> RankState:
        layout = self._layout()
        weights = dict(_weights(self._module))
        optimizer = {
            f"optimizer.{i}.{name}": value
            for i, parameter in enumerate(self._optimized())
            for name, value in self._optimizer.state.get(parameter, {}).items()
        }
        masters = {f"master.{i}": parameter.data for i, parameter in enumerate(self._optimized())}
        if self._is_partitioned:
            return RankState(own=weights | masters | optimizer, layout=layout)
        if self._is_sharded:
            shared, cut = _by_cut(weights, layout)
            return RankState(shared=shared, own=cut | masters | optimizer, layout=layout)
        shared, cut = _by_cut(weights | optimizer, layout)
        return RankState(shared=shared, own=cut, layout=layout)

    def _layout(self) -> Layout:
        trained = {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        cut = cut_in_flat_parts if self._is_partitioned else _whole
        layout: Layout = {f"weight.{name}": [cut(name, parameter)] for name, parameter in trained.items()}
        for i, pieces in enumerate(self._optimized_pieces({id(p): name for name, p in trained.items()})):
            layout[f"optimizer.{i}"] = pieces
            if self._is_sharded:
                layout[f"master.{i}"] = pieces
        return layout

    def _optimized_pieces(self, names: Mapping[int, str]) -> Iterator[list[Piece]]:
        """Yield the pieces of parameters in each of `_optimized`. names: of parameters, by `id`."""
        if not self._is_sharded:
            for parameter in self._optimized():
                yield [_whole(names[id(parameter)], parameter)]
        elif self._is_partitioned:
            for group in self._zero.fp16_groups:
                at, pieces = 0, []
                for parameter in group:
                    pieces.append(replace(cut_in_flat_parts(names[id(parameter)], parameter), at=at))
                    at += parameter.partition_numel()
                yield pieces
        else:
            for i, group in enumerate(self._zero.round_robin_bit16_groups):
                rank = dist.get_rank(self._zero.real_dp_process_group[i])
                named = [(names[id(parameter)], parameter) for parameter in group]
                yield cut_together(named, self._zero.round_robin_bit16_offsets[i], rank, self._zero.partition_size[i])

    @property
    def _is_sharded(self) -> bool:
        return self._zero is not self._optimizer

    @property
    def _is_partitioned(self) -> bool:
        """True under ZeRO 3, which cuts the weights too."""
        return any(map(_is_partitioned, self._module.parameters()))

    def _optimized(self) -> list[Tensor]:
        """Return the optimizer's parameters: the weights, or this rank's partitions of the master weights."""
        if self._is_partitioned:
            # Under ZeRO 3, the optimizer's groups contain each of these only during its step.
            return list(self._zero.fp32_partitioned_groups_flat)
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _create_optimizer_state(self, saved: Mapping[str, Tensor]) -> None:
        """Create empty tensors for all saved state, which an optimizer does not have before its first step."""
        for i, parameter in enumerate(self._optimized()):
            prefix = f"optimizer.{i}."
            for name, tensor in saved.items():
                if name.startswith(prefix):
                    # torch's optimizers keep scalars, such as the number of steps, on the CPU, except fused ones.
                    on_device = tensor.ndim or self._optimizer.defaults["fused"]
                    empty = torch.empty_like(tensor, device=parameter.device if on_device else "cpu")
                    self._optimizer.state[parameter].setdefault(name.removeprefix(prefix), empty)


def _whole(name: str, parameter: Tensor) -> Piece:
    return Piece(name, 0, 0, parameter.numel(), *shard_of(parameter))


def _by_cut(tensors: Mapping[str, Tensor], layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that are equal on all ranks, and those of weights that ranks share."""
    cut = {key for key, pieces in layout.items() if any(piece.shards > 1 for piece in pieces)}
    own = {name for name in tensors if name in cut or name.rpartition(".")[0] in cut}
    return {n: t for n, t in tensors.items() if n not in own}, {n: t for n, t in tensors.items() if n in own}


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield trained weights (under ZeRO 3, this rank's partitions), and all buffers of the model's state dict."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield f"weight.{name}", getattr(parameter, "ds_tensor", parameter).data
    state_names = set(module.state_dict(keep_vars=True))
    yield from ((f"buffer.{name}", buffer) for name, buffer in module.named_buffers() if name in state_names)


def _is_partitioned(parameter: nn.Parameter) -> bool:
    """True if ZeRO 3 has partitioned the parameter."""
    return hasattr(parameter, "ds_id")
