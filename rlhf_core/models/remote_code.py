"""Which models transformers has classes for; others bring Python code, which is never run. Imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlhf_core.models.transformers_source import assigned

REMOTE_CODE = (
    "config.json names Python code of the model's own (`auto_map`), which is never run, and transformers has no "
    "language model of its model_type; give a model of an architecture that transformers has"
)


def needs_remote_code(config: Mapping[str, Any]) -> bool:
    """Whether transformers loads the model of this config.json only with code from its repository.

    Many configs keep an `auto_map` of the time before transformers had the class: those load without it.
    """
    return bool(config.get("auto_map")) and config.get("model_type") not in causal_model_types()


def known_model_types() -> frozenset[str]:
    """Every model_type that transformers has a config for."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    return frozenset(CONFIG_MAPPING_NAMES) | causal_model_types()


def causal_model_types() -> frozenset[str]:
    """Every model_type that transformers has a causal language model for."""
    return frozenset(causal_models())


# The models that read images: each was trained and served here, and its engine gave the log-probs of the trainer.
VISION_MODELS: Mapping[str, str] = {"idefics3": "Idefics3ForConditionalGeneration"}

VISION_ENCODER, VISION_CONNECTOR = "model.vision_model", "model.connector"  # their parts beside the text model


def reads_images(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config.json reads images, too."""
    return config.get("model_type") in VISION_MODELS


@lru_cache(maxsize=1)
def causal_models() -> Mapping[str, str]:
    """The name of transformers' causal language model for each model_type, also of those that read images, too."""
    table = assigned("transformers.models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    assert isinstance(table, ast.Call)  # OrderedDict([(model_type, class), …])
    return {**dict(ast.literal_eval(table.args[0])), **VISION_MODELS}
