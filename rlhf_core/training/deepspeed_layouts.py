"""Positions of matrices in the ranks' partitions under DeepSpeed's ZeRO."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from rlhf_core.training.muon import CutMatrix, Layout, WholeMatrix


def layouts(zero: Any, stage: int) -> dict[int, Layout]:
    """Return the layout of each parameter group by index. zero: DeepSpeed's optimizer of ZeRO `stage` 1, 2 or 3."""
    if stage < 3:
        return {
            i: [WholeMatrix(start, meta.shape) for start, meta in zip(starts, metas, strict=True)]
            for i, (starts, metas) in enumerate(
                zip(zero.round_robin_bit16_offsets, zero.round_robin_bit16_meta, strict=True)
            )
        }
    groups: dict[int, Layout] = {}
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
