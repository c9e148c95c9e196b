"""Which attention implementations transformers has for an architecture. Imports no torch: its source is read."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlhf_core.models.remote_code import causal_models
from rlhf_core.models.transformers_source import module_of

_FLAGS = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}  # every class has the eager one
_ROOT_CLASS = "PreTrainedModel"  # whose flags are all false


def attention_problem(config: Mapping[str, Any], attention: str) -> str | None:
    """Why a model of this config.json cannot be trained with engine.attention `attention`; None: it can, or it is not
    known here."""
    kind = config.get("model_type")
    name = causal_models().get(kind) if isinstance(kind, str) else None
    if name is None or attention not in _FLAGS or has_flag(name, _FLAGS[attention]) is not False:
        return None
    return f"transformers has no attention `{attention}` for {name}: set engine.attention: eager"


@lru_cache(maxsize=64)
def has_flag(class_name: str, flag: str) -> bool | None:
    """What the model class says of itself, or what the class says that it is derived from; None: not known here."""
    classes = {node.name: node for node in ast.parse(module_of(class_name)).body if isinstance(node, ast.ClassDef)}
    pending, seen = [class_name], set[str]()
    while pending:
        name = pending.pop(0)
        if name == _ROOT_CLASS:
            return False
        if name in seen or name not in classes:
            continue
        seen.add(name)
        for node in classes[name].body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == flag for t in node.targets):
                return node.value.value is True if isinstance(node.value, ast.Constant) else None
        pending = [base.id for base in classes[name].bases if isinstance(base, ast.Name)] + pending
    return None
