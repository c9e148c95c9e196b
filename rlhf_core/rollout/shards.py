"""Shards of published tensors, by which the workers of one engine share its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.rollout.engine import ServedTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranges of one axis of a tensor; more than one of a tensor that was published as several fused into one."""

    axis: int
    size: int  # of the axis
    ranges: tuple[tuple[int, int], ...]  # first index, and the one after the last

    @classmethod
    def whole(cls, size: int) -> Shard:
        return cls(0, size, ((0, size),))

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.size),)

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def of(self, tensor: Tensor) -> Tensor:
        parts = [tensor.narrow(self.axis, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)


@dataclass(frozen=True, slots=True)
class ServedShard:
    """One worker's share of a tensor. The digest is that of the whole published tensor if the shard is as in it."""

    tensor: ServedTensor
    shard: Shard


def joined(answers: Sequence[Sequence[ServedShard]]) -> tuple[ServedTensor, ...]:
    """Return the tensors of an engine from the shards of its workers, in order of rank.

    A tensor of which the workers serve different versions is returned once for each of them, with its rank. Raises
    WeightSyncError, naming the tensor, if the shards do not make up the whole.
    """
    shards: dict[tuple[str, str], dict[int, ServedShard]] = {}
    for rank, answer in enumerate(answers):
        for each in answer:
            shards.setdefault((each.tensor.name, each.tensor.published), {})[rank] = each
    return tuple(tensor for _, by_rank in sorted(shards.items()) for tensor in _tensors(by_rank))


def _tensors(by_rank: dict[int, ServedShard]) -> Iterator[ServedTensor]:
    # A stage of a pipeline has received the tensors of other stages, too, and cannot read them back.
    read = {rank: each for rank, each in by_rank.items() if each.tensor.read_back} or by_rank
    first, *_ = read.values()
    served = torch.zeros(first.shard.size, dtype=torch.bool)
    for each in read.values():
        for start, stop in each.shard.ranges:
            served[start:stop] = True
    if not served.all():
        index = int(served.logical_not().nonzero()[0])
        raise WeightSyncError(
            f"no worker of the engine serves {first.tensor.name} from index {index} of axis {first.shard.axis} on"
        )
    if len({each.tensor.digest for each in read.values()}) == 1:
        yield first.tensor
    else:
        yield from (replace(each.tensor, rank=rank) for rank, each in read.items())
