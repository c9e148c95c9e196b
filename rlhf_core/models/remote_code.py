"""Models whose classes come with their files, which this system never runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOTE_CODE = (
    "config.json names Python code of the model's own (`auto_map`), which is never run, and transformers has no "
    "language model of its model_type; give a model of an architecture that transformers has"
)


def needs_remote_code(config: Mapping[str, Any]) -> bool:
    """Whether transformers loads the model of this config.json only with code from its repository.

    Many configs keep an `auto_map` of the time before transformers had the class: those load without it.
    """
    if not config.get("auto_map"):
        return False
    # Only here: importing it loads torch, where there is one.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return config.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
