"""Models with a class in transformers; others contain Python code, which is never run. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

REMOTE_CODE = (
    "config.json names Python code of the model's own (`auto_map`), which is never run, and transformers has no "
    "language model of its model_type; give a model of an architecture that transformers has"
)

# The models that read images: each was trained and served here, and its engine gave the log-probs of the trainer.
VISION_MODELS: Mapping[str, str] = {"idefics3": "Idefics3ForConditionalGeneration"}

VISION_ENCODER, VISION_CONNECTOR = "model.vision_model", "model.connector"  # their parts beside the text model


def known_model_types() -> Collection[str]:
    """Return every model_type that transformers has a config for."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    names: Mapping[str, str] = CONFIG_MAPPING_NAMES
    return names.keys()


def reads_images(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config.json also reads images."""
    return config.get("model_type") in VISION_MODELS
