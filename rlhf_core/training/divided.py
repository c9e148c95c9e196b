"""Whole tensors of a model, divided over the ranks by name: no rank could hold all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.mesh import current_mesh
from rlhf_core.training.state import Piece, RankState, copy_into


class DividedTensors:
    """Tensors by name, each in the host memory of one rank. Implements training.state.Stateful.

    A rank has its share of the bytes and at most one tensor more. Every rank must call every method.
    """

    def __init__(self, layout: Mapping[str, Tensor]) -> None:
        """layout: tensors with the shapes and dtypes, such as those of the meta device. All values are 0."""
        mesh = current_mesh()
        self.layout = {name: torch.empty_like(tensor, device="meta") for name, tensor in layout.items()}
        self._rank_of: dict[str, int] = {}
        sizes = [0] * mesh.size
        for name, tensor in self.layout.items():
            self._rank_of[name] = rank = sizes.index(min(sizes))
            sizes[rank] += tensor.nbytes
        self.own = {
            n: torch.zeros(t.shape, dtype=t.dtype) for n, t in self.layout.items() if self._rank_of[n] == mesh.rank
        }

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy `tensors`, whole on every rank, such as those of TrainingEngine.weights."""
        for name, tensor in tensors:
            if name in self.own:
                self.own[name].copy_(tensor.detach())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor on every rank, valid until the next one."""
        if current_mesh().size == 1:
            yield from self.own.items()
            return
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        for name, rank in self._rank_of.items():
            tensor = torch.empty_like(self.layout[name], device=device)
            if name in self.own:
                tensor.copy_(self.own[name])
            dist.broadcast(tensor, src=rank)
            yield name, tensor

    def state(self) -> RankState:
        return RankState(
            own={f"weight.{name}": tensor for name, tensor in self.own.items()},
            layout={f"weight.{name}": [Piece(name, 0, 0, tensor.numel())] for name, tensor in self.own.items()},
        )

    def load_state(self, state: RankState) -> None:
        copy_into(self.state().own, state.own)
