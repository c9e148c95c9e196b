"""LLaVA-OneVision: an image as a tile of the whole and tiles of its parts, without the borders that were added."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_core.errors import StageError
from rlhf_core.models.vision_models.base import VisionModel
from rlhf_core.models.vision_models.processors import images_only
from rlhf_core.types import Pixels


class LlavaOneVision(VisionModel):
    """A tile is a whole image, its rows are squares, and its size is that of the picture's file, in pixels."""

    def open_processor(self, folder: Path) -> Any:
        return images_only("LlavaOnevisionProcessor", folder)

    def pixels(self, inputs: Mapping[str, Any], tokens: int) -> Pixels:
        (values,), sizes = inputs["pixel_values"].float(), inputs["image_sizes"]
        if len(sizes) != 1 or not tokens:
            raise StageError(f"the processor gives {len(sizes)} sizes for an image of {tokens} tokens")
        return Pixels(values, torch.tensor([tokens]), rows=torch.tensor([len(values)]), sizes=sizes)

    def blank(self, config: Any) -> Pixels:
        """Return the image of the smallest size that is cut into squares."""
        side, patch = config.vision_config.image_size, config.vision_config.patch_size
        height, width = min(config.image_grid_pinpoints, key=lambda size: size[0] * size[1])
        down, across, patches = height // side, width // side, side // patch
        tokens = patches**2 + down * patches * (across * patches + 1)  # one more at the end of each line
        rows = 1 + down * across
        return Pixels(
            torch.ones(rows, 3, side, side), torch.tensor([tokens]), rows=torch.tensor([rows]),
            sizes=torch.tensor([[height, width]]),
        )  # fmt: skip

    def inputs(self, pixels: Pixels) -> dict[str, Any]:
        return {"pixel_values": pixels.values, "image_sizes": pixels.sizes}
