"""What transformers' source says of its tables and models. Reads it: its modules import torch, which takes seconds,
and which an orchestrator lacks."""

from __future__ import annotations

import ast
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path


def assigned(module: str, name: str) -> ast.expr:
    """What the module assigns to `name`. Raises ImportError if it assigns nothing: a version that was not tested."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    raise ImportError(f"{spec.origin} has no {name}: another version of transformers than was tested")


@lru_cache(maxsize=8)
def names_in(module: str, table: str) -> frozenset[str]:
    """The keys of a dict that the module writes out."""
    value = assigned(module, table)
    assert isinstance(value, ast.Dict)
    return frozenset(ast.literal_eval(key) for key in value.keys if key is not None)


@lru_cache(maxsize=8)
def module_of(model_class: str) -> str:
    """The text of the module that has the model class; empty if it is not found."""
    for path in _model_files():
        text = path.read_text(encoding="utf-8")
        if f"\nclass {model_class}(" in text:
            return text
    return ""


@lru_cache(maxsize=1)
def _model_files() -> list[Path]:
    spec = find_spec("transformers.models")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return [path for folder in spec.submodule_search_locations for path in sorted(Path(folder).glob("*/modeling_*.py"))]
