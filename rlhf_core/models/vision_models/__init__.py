"""Architectures that read images: a file for each, with its own computation, and this table.

A new one is a file here, its line below, and its parts in models/folders/vision_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.models.vision_models.base import ReadImage, VisionModel
from rlhf_core.models.vision_models.idefics3 import Idefics3, SmolVLM
from rlhf_core.models.vision_models.llava_onevision import LlavaOneVision
from rlhf_core.models.vision_models.qwen2_5_vl import Qwen25VL
from rlhf_core.models.vision_models.qwen3_vl import Qwen3VL
from rlhf_core.models.vision_models.tiles import Gemma3, InternVL

__all__ = ["ARCHITECTURES", "ReadImage", "VisionModel"]

ARCHITECTURES: Mapping[str, VisionModel] = {  # by model_type
    "idefics3": Idefics3(),
    "smolvlm": SmolVLM(),
    "qwen2_5_vl": Qwen25VL(),
    "qwen3_vl": Qwen3VL(),
    "gemma3": Gemma3(),
    "internvl": InternVL(),
    "llava_onevision": LlavaOneVision(),
}
