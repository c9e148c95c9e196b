"""Positions of parameters in the ranks' partitions under DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlhf_core.models.tensor_parallel import shard_of
from rlhf_core.training import muon
from rlhf_core.training.muon import CutMatrix, WholeMatrix
from rlhf_core.training.state import Piece


def cut_in_flat_parts(name: str, parameter: Any) -> Piece:
    """Return what ZeRO 3 leaves of a parameter on this rank: one of equal parts, the last ones padded."""
    length = parameter.partition_numel()
    start = min(parameter.ds_numel, dist.get_rank(parameter.ds_process_group) * length)
    return Piece(name, start, 0, min(length, parameter.ds_numel - start))


def cut_together(
    parameters: Iterable[tuple[str, Tensor]], offsets: Iterable[int], rank: int, partition: int
) -> list[Piece]:
    """Return what ZeRO 1 and 2 leave of a group of parameters on `rank`: one of equal parts of all of them in a row.

    offsets: of each in the row. partition: the length of a part.
    """
    first, last = rank * partition, (rank + 1) * partition
    pieces = []
    for (name, parameter), offset in zip(parameters, offsets, strict=True):
        low, high = max(first, offset), min(last, offset + parameter.numel())
        if low < high:
            pieces.append(Piece(name, low - offset, low - first, high - low, *shard_of(parameter)))
    return pieces


def layouts(zero: Any, stage: int) -> dict[int, muon.Layout]:
    """Return the layout of each parameter group by index. zero: DeepSpeed's optimizer of ZeRO `stage` 1, 2 or 3."""
    if stage < 3:
        return {
            i: [WholeMatrix(start, meta.shape) for start, meta in zip(starts, metas, strict=True)]
            for i, (starts, metas) in enumerate(
                zip(zero.round_robin_bit16_offsets, zero.round_robin_bit16_meta, strict=True)
            )
        }
    groups: dict[int, muon.Layout] = {}
    for sub_group, parameters in enumerate(zero.fp16_groups):
        group = zero.sub_group_to_group_id[sub_group]
        if group in groups:
            raise RuntimeError(f"ZeRO 3 cut parameter group {group} in several; sub_group_size is too small for it")
        lengths = [parameter.partition_numel() for parameter in parameters]
        starts = [0, *accumulate(lengths)][:-1]
        groups[group] = [
            CutMatrix(start, length, parameter.ds_shape)
            for start, length, parameter in zip(starts, lengths, parameters, strict=True)
        ]
    return groups
