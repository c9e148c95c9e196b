"""The ranks of a process group as replicas of a model, each on one rank or on several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

Axis = Literal["data", "sequence", "tensor"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """data x sequence x tensor ranks, and which of them this one is.

    A replica is sequence x tensor ranks. They get the same batches, and count once in sums; those that share weights
    draw the same random numbers. They are neighbours:
    rank = (replica * sequence + place along `sequence`) * tensor + place along `tensor`.
    """

    data: int = 1  # replicas
    sequence: int = 1  # ranks that share the tokens of a batch
    tensor: int = 1  # ranks that share each weight
    rank: int = 0
    # The ranks that differ from this one along an axis alone; an axis of one rank, or of all, has no entry.
    groups: Mapping[Axis, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.data * self.sequence * self.tensor

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to: its place along `data`."""
        return self.rank // (self.sequence * self.tensor)

    @property
    def part(self) -> int:
        """The part of each batch's tokens that this rank has: its place along `sequence`."""
        return self.rank // self.tensor % self.sequence

    @property
    def shard(self) -> int:
        """The part of each cut weight that this rank has: its place along `tensor`."""
        return self.rank % self.tensor

    def reduce(
        self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, over: Literal["data", "tensor", "all"]
    ) -> Tensor:
        """`values`, reduced in place over the replicas, of which each counts once, over the ranks that share weights,
        or over all ranks.
        """
        sizes = {"data": self.data, "tensor": self.tensor, "all": self.size}
        if sizes[over] > 1:
            dist.all_reduce(values, op=op, group=None if over == "all" else self.groups.get(over))
        return values


_joined: Mesh | None = None


def join_mesh(*, sequence: int, tensor: int, timeout: timedelta) -> Mesh:
    """Divide the ranks of this process's group into replicas of sequence x tensor. Every rank must call it once.

    Raises ValueError if the number of ranks is not divisible.
    """
    global _joined
    size, rank = dist.get_world_size(), dist.get_rank()
    replicas, rest = divmod(size, sequence * tensor)
    if rest or not replicas:
        raise ValueError(f"{size} ranks are not a multiple of a replica's, sequence {sequence} x tensor {tensor}")
    ranks = torch.arange(size).view(replicas, sequence, tensor)
    groups: dict[Axis, dist.ProcessGroup] = {}
    for dimension, axis in enumerate(get_args(Axis)):
        if 1 < ranks.shape[dimension] < size:
            lines = ranks.movedim(dimension, -1).flatten(0, 1).tolist()
            group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
            groups[axis] = group
    _joined = Mesh(replicas, sequence, tensor, rank, groups)
    return _joined


def current_mesh() -> Mesh:
    """The mesh of this process's group, or of one rank if it has not joined any."""
    if _joined is not None:
        return _joined
    if dist.is_initialized():
        raise RuntimeError("this process has a group without a mesh: join it by rlhf_core.training.distributed")
    return Mesh()
