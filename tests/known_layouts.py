"""Engines of one model, of which tests build hundreds: the layouts of its sequences are measured once a process.

The measurement has tests of its own (tests/rlhf_core/models/test_layouts.py), which call it without an engine. It takes
a third of an engine's start, of models as small as these.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

from rlhf_core.models import layout_check, layouts, tree_attention
from rlhf_core.models.packed import PackedModel
from rlhf_core.training.deepspeed_engine import DeepSpeedEngine

_measure = DeepSpeedEngine._check_layouts
_known: dict[Hashable, tuple[layouts.Layouts, str]] = {}  # and the attention that it goes with


def remember() -> None:
    """From here on engines of this process take what was measured for a model of the same class and config."""
    DeepSpeedEngine._check_layouts = _check_layouts  # type: ignore[method-assign]


def _check_layouts(self: DeepSpeedEngine, model: PackedModel) -> None:
    if self._config.compiled:
        _measure(self, model)
        return
    transformer = model._transformer
    key = _key(self, model)
    if key not in _known:
        _measure(self, model)
        _known[key] = model.layouts, transformer.config._attn_implementation
        return
    model.layouts, attention = _known[key]
    if attention == tree_attention.IMPLEMENTATION:
        tree_attention.use_tree_attention(transformer)
    elif attention != transformer.config._attn_implementation:
        transformer.set_attn_implementation(attention)


def _key(engine: DeepSpeedEngine, model: PackedModel) -> Hashable:
    transformer: Any = model._transformer
    config = {name: value for name, value in transformer.config.to_dict().items() if name != "_name_or_path"}
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    # The last two are what tests.rlhf_core.laid_out replaces.
    return (
        type(model), type(model.model), type(transformer), json.dumps(config, sort_keys=True, default=str), finite,
        transformer.dtype, transformer.config._attn_implementation, engine._config.gradient_checkpointing,
        engine._config.zero_stage == 3, engine._optimizer_config is None, engine.mesh.size, engine.mesh.sequence,
        engine.mesh.tensor, layout_check._tree_problem, layouts.rows_are_cheaper,
    )  # fmt: skip
