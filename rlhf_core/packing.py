"""Packing of sequences into batches, and selection of examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_core.types import PackedBatch

B = TypeVar("B", bound=PackedBatch)

# Tokens that sequences must begin with alike for it to pay to compute these once (models/token_tree.py).
LEAST_SHARED = 8


def pack(token_ids: Sequence[Sequence[int] | Tensor], loss_masks: Sequence[Sequence[bool] | Tensor]) -> PackedBatch:
    """Concatenate sequences. token_ids: S sequences of T_s >= 1 tokens; loss_masks: as many, of the same lengths.

    Raises ValueError on an empty batch, an empty sequence, or lengths that differ.
    """
    ids = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in token_ids]
    masks = [torch.as_tensor(mask, dtype=torch.bool) for mask in loss_masks]
    if not ids or len(ids) != len(masks):
        raise ValueError(f"pack: {len(ids)} sequences with {len(masks)} masks: give equal numbers, at least one")
    for i, (sequence, mask) in enumerate(zip(ids, masks, strict=True)):
        if sequence.numel() == 0 or sequence.shape != mask.shape:
            raise ValueError(f"pack: sequence {i} has {sequence.numel()} tokens and a mask of {mask.numel()}")
    return PackedBatch(
        input_ids=torch.cat(ids),
        sequence_lengths=torch.tensor([sequence.numel() for sequence in ids]),
        loss_mask=torch.cat(masks),
    )


def select(batch: B, examples: Sequence[int]) -> B:
    """Select the examples of `batch` with these indices, in that order, with all their fields."""
    return select_each(batch, [examples])[0]


def select_each(batch: B, parts: Sequence[Sequence[int]]) -> list[B]:
    """Select each of the parts, as `select` does."""
    host = batch.on_host
    lengths = host.example_lengths
    ends = lengths.cumsum(0)
    starts = ends - lengths
    chosen = [torch.as_tensor(list(part), dtype=torch.int64) for part in parts]
    selected = [_selected(batch, part, starts, ends) for part in chosen]
    if host is batch:
        return selected
    return [
        on_device.remembering(_selected(host, part, starts, ends))
        for on_device, part in zip(selected, chosen, strict=True)
    ]


def _selected(batch: B, chosen: Tensor, starts: Tensor, ends: Tensor) -> B:
    spans = list(zip(starts[chosen].tolist(), ends[chosen].tolist(), strict=True))
    per_example = batch.sequences_per_example
    indices = {
        "sequence": (chosen.unsqueeze(1) * per_example + torch.arange(per_example)).flatten(),
        "example": chosen,
    }
    changed: dict[str, Any] = {}
    for field in fields(batch):
        value, per = getattr(batch, field.name), field.metadata.get("per", "token")
        if value is not None and per == "token":
            changed[field.name] = torch.cat([value[start:end] for start, end in spans])
        elif value is not None and per in indices:
            changed[field.name] = value[indices[per].to(value.device)]
    return _with_own_tiles(replace(batch, **changed))


def _with_own_tiles(batch: B) -> B:
    """Drop the tiles of `batch` that none of its tokens refers to."""
    parts, pixels = batch.image_parts, batch.pixels
    if parts is None or pixels is None:
        return batch
    is_image = parts >= 0
    of_parts = pixels.tile_of(parts[is_image])
    tiles = of_parts.unique()
    if not len(tiles):
        return replace(batch, image_parts=None, pixels=None)
    chosen = pixels.select(tiles)
    moved = parts.clone()
    moved[is_image] += chosen.first_parts()[torch.searchsorted(tiles, of_parts)] - pixels.first_parts()[of_parts]
    return replace(batch, image_parts=moved, pixels=chosen)


def select_sequences(batch: PackedBatch, sequences: Sequence[int]) -> PackedBatch:
    """Select the sequences of `batch` with these indices, in that order, without the fields of subclasses."""
    return select(plain(batch), sequences)


def plain(batch: PackedBatch) -> PackedBatch:
    """Return `batch` without the fields of subclasses: what a model reads."""
    result, host = _plain(batch), batch.on_host
    return result if host is batch else result.remembering(_plain(host))


def _plain(batch: PackedBatch) -> PackedBatch:
    return PackedBatch(**{field.name: getattr(batch, field.name) for field in fields(PackedBatch)})
