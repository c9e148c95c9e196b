"""The architectures that read images, as their folders tell them. Imports no torch.

What differs in their computation is in models/vision_models/, a file for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VisionParts:
    """The parts of a model beside its text model, by their paths in it."""

    encoder: str
    connectors: tuple[str, ...]  # from the encoder to the text model; they may be inside the encoder
    image_field: str = "image_token_id"  # of config.json: the token that templates write for an image
    engine_libraries: tuple[str, ...] = ("torchvision",)  # that vLLM needs for it, beside its own
    sees_whole_images: bool = False  # a token of an image also sees those of it that are behind it

    @property
    def all(self) -> tuple[str, ...]:
        return (self.encoder, *self.connectors)


# By model_type. Each was trained here: its log-probs and gradients were those of the model's own forward.
VISION_MODELS: Mapping[str, VisionParts] = {
    "idefics3": VisionParts("model.vision_model", ("model.connector",), engine_libraries=()),
    "smolvlm": VisionParts("model.vision_model", ("model.connector",), engine_libraries=("torchvision", "num2words")),
    "qwen2_5_vl": VisionParts("model.visual", ("model.visual.merger",)),
    "qwen3_vl": VisionParts("model.visual", ("model.visual.merger", "model.visual.deepstack_merger_list")),
    "gemma3": VisionParts(
        "model.vision_tower", ("model.multi_modal_projector",), "boi_token_index", sees_whole_images=True
    ),
    "internvl": VisionParts("model.vision_tower", ("model.multi_modal_projector",)),
    "llava_onevision": VisionParts("model.vision_tower", ("model.multi_modal_projector",), "image_token_index"),
}


def reads_images(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a model that also reads images."""
    return config.get("model_type") in VISION_MODELS


def vision_parts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of a model's parts beside its text model; none if it reads text alone."""
    return VISION_MODELS[config["model_type"]].all if reads_images(config) else ()
