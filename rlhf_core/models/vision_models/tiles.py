"""Gemma 3 and InternVL: square tiles of one size, each of as many tokens, without padding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.models.vision_models.base import VisionModel
from rlhf_core.models.vision_models.processors import images_only
from rlhf_core.types import Pixels


class Tiles(VisionModel):
    def pixels(self, inputs: Mapping[str, Any], tokens: int) -> Pixels:
        values = inputs["pixel_values"].float()
        of_each, left = divmod(tokens, len(values))
        if left or not of_each:
            raise StageError(f"the processor gives {len(values)} tiles and {tokens} tokens")
        return Pixels(values, torch.full((len(values),), of_each))

    @abstractmethod
    def tile(self, config: Any) -> tuple[int, int]:
        """Return the side of a tile in pixels, and its tokens."""

    def blank(self, config: Any) -> Pixels:
        side, tokens = self.tile(config)
        return Pixels(torch.ones(1, 3, side, side), torch.tensor([tokens]))

    def inputs(self, pixels: Pixels) -> dict[str, Any]:
        return {"pixel_values": pixels.values}


class Gemma3(Tiles):
    """The tokens of a tile see each other, also those after them. Templates write the mark before an image."""

    def feature_token_id(self, processor: Any) -> int:
        token: int = processor.tokenizer.image_token_id
        return token

    def merges(self, processor: Any) -> Mapping[tuple[int, int], int]:
        """An image begins and ends with two newlines. As vLLM merges them."""
        ids = processor.tokenizer.get_vocab()
        lines = {count: ids["\n" * count] for count in range(1, 5) if "\n" * count in ids}
        pairs = [(a, b) for a, b in ((1, 2), (2, 1), (2, 2)) if {a, b, a + b} <= lines.keys()]
        return {(lines[a], lines[b]): lines[a + b] for a, b in pairs}

    def tile(self, config: Any) -> tuple[int, int]:
        return config.vision_config.image_size, config.mm_tokens_per_image

    def token_types(self, is_image: Tensor) -> dict[str, Any]:
        return {"token_type_ids": is_image.int()}

    def arguments(self, later: Sequence[Tensor], is_image: Tensor) -> dict[str, Any]:
        return self.token_types(is_image)  # from which the model makes its masks


class InternVL(Tiles):
    def open_processor(self, folder: Path) -> Any:
        return images_only("InternVLProcessor", folder)

    def tile(self, config: Any) -> tuple[int, int]:
        side, patch = (getattr(config.vision_config, name)[0] for name in ("image_size", "patch_size"))
        return side, int((side // patch * config.downsample_ratio) ** 2)
