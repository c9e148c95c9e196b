"""transformers' plans of how ranks share the weights of a model's layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.models.folders.folder import text_config

# Rows of a matrix, or columns; or a vector whose gradient is summed over the ranks, since each has other heads.
COLUMN, ROW, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"

_SIZES = {"num_attention_heads": "query heads", "num_key_value_heads": "key heads", "intermediate_size": "rows of MLPs"}


def layer_styles(plan: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a plan that is about layers: embeddings and heads stay whole."""
    return {pattern: style for pattern, style in plan.items() if "*" in pattern}


def plan_problem(model_class: str, plan: Mapping[str, str]) -> str | None:
    """Return the reason why ranks cannot share the weights of a model of this class; None if they can.

    plan: transformers' of the model.
    """
    styles = layer_styles(plan)
    if not styles:
        return f"transformers has no plan of how workers share the layers of {model_class}: remove it"
    if other := sorted({*styles.values()} - {COLUMN, ROW, SUMMED}):
        return (
            f"workers would share layers of {model_class} as {', '.join(other)}, for which DeepSpeed has no layers: "
            "remove it"
        )
    return None


def sizes_problem(settings: Mapping[str, Any], ranks: int) -> str | None:
    """Return the reason why the layers cannot be cut in `ranks` equal parts; None if they can.

    settings: of a config.json.
    """
    sizes = text_config(settings)
    for name, what in _SIZES.items():
        size = sizes.get(name)
        if isinstance(size, int) and size % ranks:
            return f"{ranks} workers cannot share {size} {what} ({name}) equally: set a number that divides them"
    return None
