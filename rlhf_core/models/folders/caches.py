"""The key-value cache that a model's config.json describes. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.models.folders.folder import text_config

# Settings of models whose layers do not all keep the keys and values of all tokens.
_OTHER_CACHES = ("sliding_window", "layers_block_type", "kv_lora_rank", "num_kv_shared_layers")


def caches_all_tokens(config: Mapping[str, Any]) -> bool:
    """Return whether, by the model's config, an engine keeps the keys and values of all tokens in every layer."""
    text = text_config(config)
    kinds = text.get("layer_types") or []
    whole = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    return whole and not any(text.get(name) for name in _OTHER_CACHES)
