"""What differs between architectures that read images: a file for each, and this table.

A new one is a file here, its line below, and its parts in models/folders/vision_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.models.vision_models.base import ReadImage, VisionModel
from rlhf_core.models.vision_models.idefics3 import Idefics3

__all__ = ["ARCHITECTURES", "ReadImage", "VisionModel"]

ARCHITECTURES: Mapping[str, VisionModel] = {  # by model_type
    "idefics3": Idefics3(),
}
