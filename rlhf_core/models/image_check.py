"""Measures whether hidden states of sequences with images are those of the model's own forward.

Text alone shows nothing of it: positions along several axes are those of text there, and what later layers add at the
places of images is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.models.layout_sequences import LENGTHS, different_sequences
from rlhf_core.models.layouts import Layouts, run_backbone
from rlhf_core.models.output_head import backbone
from rlhf_core.models.vision_models import ARCHITECTURES
from rlhf_core.packing import pack, select_sequences
from rlhf_core.types import PackedBatch, Pixels

_BEFORE = (2, 3)  # tokens of text before the image of the first sequence, and of the second; the third has none


@torch.no_grad()
def require_own_images(model: Any, layouts: Layouts, device: torch.device, tolerance: float) -> None:
    """Raise StageError unless sequences with an image have the hidden states of the model's own forward of each alone.

    model: a PreTrainedModel that reads images, in eval mode; tolerance: of the mean difference, relative to the spread.
    """
    batch = _sequences(model, device)
    found = run_backbone(model, batch, layouts)[0].all().float()
    expected = torch.cat([_own(model, select_sequences(batch, [i])) for i in range(batch.num_sequences)]).float()
    spread = (expected - expected.mean(0)).abs().mean()
    difference = float((found - expected).abs().mean() / spread.clamp_min(1e-30))
    if not difference <= tolerance:
        raise StageError(
            f"{type(model).__name__}: what it computes for sequences with images, laid out {layouts}, differs from its "
            f"own forward by {difference:.2g} of the spread (rounding explains {tolerance:.2g}): it cannot be trained "
            "on images here; take a model of another architecture"
        )


def _sequences(model: Any, device: torch.device) -> PackedBatch:
    """Return two sequences with an image each, of different pixels, and one of text."""
    blank = ARCHITECTURES[model.config.model_type].blank(model.config)
    waves = torch.arange(blank.values.numel(), dtype=torch.float32).view_as(blank.values).mul(0.7).sin()
    pixels = Pixels.joined([_with(blank, waves), _with(blank, -waves)])
    count = int(blank.tokens.sum())
    image = torch.full((count,), model.config.image_token_id)
    texts = different_sequences(model, torch.device("cpu")).input_ids.split(list(LENGTHS))
    ids, parts = [], []
    for number, text in enumerate(texts):
        before = _BEFORE[number] if number < len(_BEFORE) else len(text)
        own = torch.arange(count) + number * count if number < len(_BEFORE) else torch.arange(0)
        nothing = torch.full_like(text, -1)
        ids.append(torch.cat([text[:before], image[: len(own)], text[before:]]))
        parts.append(torch.cat([nothing[:before], own, nothing[before:]]))
    packed = pack(ids, [torch.ones(len(each)) for each in ids])
    return PackedBatch(
        packed.input_ids, packed.sequence_lengths, packed.loss_mask, image_parts=torch.cat(parts), pixels=pixels
    ).to(device)


def _with(blank: Pixels, values: Tensor) -> Pixels:
    return Pixels(values, blank.tokens, rows=blank.rows, mask=blank.mask, sizes=blank.sizes)


def _own(model: Any, batch: PackedBatch) -> Tensor:
    """Return the hidden states (T, d) of one sequence by the model's own forward."""
    architecture = ARCHITECTURES[model.config.model_type]
    ids = batch.input_ids.unsqueeze(0)
    arguments: dict[str, Any] = {}
    if batch.pixels is not None and batch.image_parts is not None:
        is_image = (batch.image_parts >= 0).unsqueeze(0)
        arguments = {**architecture.inputs(batch.pixels), **architecture.token_types(is_image)}
    hidden: Tensor = backbone(model)(input_ids=ids, use_cache=False, **arguments).last_hidden_state
    return hidden.squeeze(0)
