"""Weights that ranks share: of a layer's matrix each rank has equally many rows or columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.mesh import current_mesh

_ATTRIBUTE = "cut_over_ranks"  # of a parameter


@dataclass(frozen=True, slots=True)
class Cut:
    """Division of a parameter over the ranks that share weights."""

    axis: int
    shape: torch.Size  # of the whole parameter

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole parameter, of those ranks' parts. All of them must call it."""
        mesh = current_mesh()
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(mesh.tensor)]
        dist.all_gather(parts, part.contiguous(), group=mesh.groups.get("tensor"))
        return torch.cat(parts, self.axis)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole parameter."""
        mesh = current_mesh()
        return whole.chunk(mesh.tensor, self.axis)[mesh.shard]


def mark_cut(parameter: Tensor, axis: int) -> None:
    """Record that `parameter` is this rank's part of one that is cut along `axis`."""
    shape = list(parameter.shape)
    shape[axis] *= current_mesh().tensor
    setattr(parameter, _ATTRIBUTE, Cut(axis, torch.Size(shape)))


def cut_of(parameter: Tensor) -> Cut | None:
    """Return how a live parameter is divided over ranks that share weights; None: each has all of it."""
    return cast("Cut | None", getattr(parameter, _ATTRIBUTE, None))


def shard_of(parameter: Tensor) -> tuple[int, int]:
    """Return which part of a parameter this rank has, and of how many."""
    mesh = current_mesh()
    return (0, 1) if cut_of(parameter) is None else (mesh.shard, mesh.tensor)


def whole(parameter: Tensor) -> Tensor:
    """Return the values of a live parameter, those of a divided one on each of its ranks, which must all call it."""
    cut = cut_of(parameter)
    return parameter.detach() if cut is None else cut.whole(parameter.detach())
