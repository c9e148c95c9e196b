"""Qwen2.5-VL: images of any size as patches, with attention in windows, and positions along three axes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.models.vision_models.base import VisionModel
from rlhf_core.models.vision_models.grids import grid_positions
from rlhf_core.models.vision_models.processors import images_only
from rlhf_core.types import PackedBatch, Pixels

_BLANK = (2, 3)  # tokens along its height and its width, which differ


class Qwen25VL(VisionModel):
    """A tile is a whole image, its rows are patches, and its size is their number along time, height and width."""

    def open_processor(self, folder: Path) -> Any:
        return images_only("Qwen2_5_VLProcessor", folder)

    def pixels(self, inputs: Mapping[str, Any], tokens: int) -> Pixels:
        values, sizes = inputs["pixel_values"].float(), inputs["image_grid_thw"]
        if len(sizes) != 1 or int(sizes.prod()) != len(values) or not tokens:
            raise StageError(f"the processor gives {len(values)} patches for a grid {sizes.tolist()}, {tokens} tokens")
        return Pixels(values, torch.tensor([tokens]), rows=torch.tensor([len(values)]), sizes=sizes)

    def blank(self, config: Any) -> Pixels:
        vision = config.vision_config
        height, width = (side * vision.spatial_merge_size for side in _BLANK)
        values = torch.ones(height * width, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
        tokens, rows = torch.tensor([_BLANK[0] * _BLANK[1]]), torch.tensor([height * width])
        return Pixels(values, tokens, rows=rows, sizes=torch.tensor([[1, height, width]]))

    def inputs(self, pixels: Pixels) -> dict[str, Any]:
        return {"pixel_values": pixels.values, "image_grid_thw": pixels.sizes}

    def token_types(self, is_image: Tensor) -> dict[str, Any]:
        return {"mm_token_type_ids": is_image.int()}

    def position_ids(self, config: Any, batch: PackedBatch) -> Tensor:
        return grid_positions(batch, config.vision_config.spatial_merge_size)
