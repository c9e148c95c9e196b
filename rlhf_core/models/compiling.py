"""torch.compile of a model's layers: fewer passes over the activations between its matrix products.

Norms, rotary positions, activation functions and sums become one loop each. Values are rounded wherever the plain
layers round them: so a forward computes the same with and without gradients, and a policy's ratio to itself stays 1.
Attention is not changed. The compiled code is kept in a folder of the node, TORCHINDUCTOR_CACHE_DIR.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from rlhf_core.errors import StageError
from rlhf_core.models import tree_attention

# Kinds of call that are compiled apart: with and without gradients, in training and not, one row and several, for each
# kind of layer. More than that would be a graph for each batch.
_MOST_GRAPHS = 64


def compile_layers(model: Any) -> None:
    """Compile a PreTrainedModel's layers in place: each kind of call at its first time, for any number of tokens.

    Raises StageError for a model that declares no layers, or that has experts, whose numbers of tokens differ from call
    to call.
    """
    name, config = type(model).__name__, model.config.get_text_config().to_dict()
    if any("experts" in key and value for key, value in config.items()):
        raise StageError(f"{name} has experts, whose layers are not compiled; remove engine.compiled")
    layers = _layers(model)
    if not layers:
        raise StageError(f"{name} does not say which of its modules are layers; remove engine.compiled")
    options = set_up_compilation(_MOST_GRAPHS)
    tree_attention.keep_from_compilation()
    for layer in layers:
        layer.compile(dynamic=True, options={"emulate_precision_casts": True, **options})


def set_up_compilation(most_graphs: int) -> dict[str, str | int | bool | Callable[..., Any]]:
    """Set what compiled code of this process has in common, and return the options that it needs.

    most_graphs: of one function; one more is an error.
    """
    import torch._dynamo.config  # not at the top: it takes a second

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "torchinductor"))
    torch._dynamo.config.recompile_limit = most_graphs
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # in place of uncompiled code from there on, in silence
    return {"compile_threads": 1}  # others would be processes that outlive this one when it is killed


def _layers(model: Any) -> list[nn.Module]:
    """Return the modules that no device map may split: the consecutive layers of a transformer."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
