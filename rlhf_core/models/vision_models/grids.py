"""Positions along time, height and width: M-RoPE, section 2.1 of arXiv:2409.12191."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.types import PackedBatch


def grid_positions(batch: PackedBatch, merge: int) -> Tensor:
    """Return the positions (3, N) int64 of tokens along time, height and width; those of text are equal.

    An image's tokens are the cells of a grid that starts at the position after the text before it; the text after it
    continues behind its longest side. merge: patches along each side of a token.
    """
    indices = batch.position_ids.expand(3, -1)
    parts, pixels = batch.image_parts, batch.pixels
    if parts is None or pixels is None:
        return indices
    assert pixels.sizes is not None
    is_image = parts >= 0
    tile = pixels.tile_of(parts.clamp_min(0))
    place = parts - pixels.first_parts()[tile]
    height, width = (pixels.sizes[tile, axis] // merge for axis in (1, 2))
    is_last = place == pixels.tokens[tile] - 1
    step = torch.where(is_image, torch.where(is_last, torch.maximum(height, width), 0), 1)
    before = step.cumsum(0) - step
    first = batch.sequence_lengths.cumsum(0) - batch.sequence_lengths
    start = before - before[first].repeat_interleave(batch.sequence_lengths, output_size=batch.num_tokens)
    cells = torch.stack([place // (height * width), place // width % height, place % width])
    return start + torch.where(is_image, cells, 0)
