"""Models with a class in transformers; others contain Python code, which is never run. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

REMOTE_CODE = (
    "config.json names Python code of the model's own (`auto_map`), which is never run, and transformers has no "
    "language model of its model_type; give a model of an architecture that transformers has"
)


def known_model_types() -> Collection[str]:
    """Return every model_type that transformers has a config for."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    names: Mapping[str, str] = CONFIG_MAPPING_NAMES
    return names.keys()
