"""Qwen3-VL: as Qwen2.5-VL, with features that the first layers of the text model add (arXiv:2406.04334)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlhf_core.models.output_head import backbone
from rlhf_core.models.vision_models.base import flattened
from rlhf_core.models.vision_models.processors import images_only
from rlhf_core.models.vision_models.qwen2_5_vl import Qwen25VL
from rlhf_core.types import Pixels


class Qwen3VL(Qwen25VL):
    def open_processor(self, folder: Path) -> Any:
        return images_only("Qwen3VLProcessor", folder)

    def features(self, model: Any, pixels: Pixels) -> Sequence[Tensor]:
        output = self.encoded(model, pixels)
        return [flattened(each) for each in (output.pooler_output, *output.deepstack_features)]

    def arguments(self, later: Sequence[Tensor], is_image: Tensor) -> dict[str, Any]:
        return {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(later)}

    def layers(self, model: Any) -> nn.Module:
        text_model: nn.Module = backbone(model).get_submodule("language_model")  # the module around it takes images
        return text_model
