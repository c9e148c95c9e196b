"""Idefics3, and SmolVLM: square tiles of one size, each of as many tokens, padded tiles with a mask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_core.errors import StageError
from rlhf_core.models.vision_models.base import VisionModel
from rlhf_core.models.vision_models.processors import images_only
from rlhf_core.types import Pixels


class Idefics3(VisionModel):
    def pixels(self, inputs: Mapping[str, Any], tokens: int) -> Pixels:
        values, mask = inputs["pixel_values"][0].float(), inputs["pixel_attention_mask"][0].bool()
        of_each, left = divmod(tokens, len(values))
        if left or not of_each:
            raise StageError(f"the processor gives {len(values)} tiles and {tokens} tokens")
        return Pixels(values, torch.full((len(values),), of_each), mask=mask)

    def blank(self, config: Any) -> Pixels:
        side = config.vision_config.image_size
        tokens = (side // config.vision_config.patch_size // config.scale_factor) ** 2
        mask = torch.ones(1, side, side, dtype=torch.bool)
        return Pixels(torch.ones(1, 3, side, side), torch.tensor([tokens]), mask=mask)

    def inputs(self, pixels: Pixels) -> dict[str, Any]:
        assert pixels.mask is not None
        return {"pixel_values": pixels.values.unsqueeze(0), "pixel_attention_mask": pixels.mask.unsqueeze(0)}


class SmolVLM(Idefics3):
    def open_processor(self, folder: Path) -> Any:
        # It writes an image as SmolVLM's does, and needs no package for the numbers of a video's frames.
        return images_only("Idefics3Processor", folder)
