"""Checks whether an adapter can be merged, by its adapter_config.json. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.models.folders.folder import ADAPTER_WEIGHTS

_MERGED = frozenset({
    "r", "lora_alpha", "lora_dropout", "lora_bias", "use_rslora", "use_dora", "bias", "fan_in_fan_out",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "modules_to_save", "trainable_token_indices", "ensure_weight_tying",
})  # fmt: skip
# Keys without an effect on the weights, or only with another setting.
_BESIDE = frozenset({
    "peft_type", "peft_version", "task_type", "init_lora_weights", "base_model_name_or_path", "revision",
    "auto_mapping", "inference_mode", "megatron_core", "qalora_group_size",
})  # fmt: skip
# Other ones are computed from data, or quantise the base, whose weights are not known again afterwards.
_INITIALISED = (True, False, "gaussian", "orthogonal", "olora", "pissa")
_TASKS = ("CAUSAL_LM", "SEQ_CLS", None)
# With these alone a weight is changed by one product of factors, of one scaling, whatever the base's weights are.
_PLAIN = frozenset({
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "modules_to_save",
})  # fmt: skip
_PLAINLY_INITIALISED = (True, False, "gaussian", "orthogonal")


def adapter_problems(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why the adapter in `folder` cannot be merged. config: its adapter_config.json."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        yield f"there is no {ADAPTER_WEIGHTS} in this folder: save the adapter with peft's save_pretrained"
    if (kind := config.get("peft_type")) != "LORA":
        yield f"its peft_type is {kind}, and only LORA can be merged"
        return
    if (task := config.get("task_type")) not in _TASKS:
        yield f"its task_type is {task}, and adapters are merged into models of CAUSAL_LM or SEQ_CLS"
    if (how := config.get("init_lora_weights", True)) not in _INITIALISED:
        yield f"its base weights were modified at initialisation (init_lora_weights={how!r})"
    others = sorted(name for name, value in config.items() if value and name not in _MERGED | _BESIDE)
    if others:
        yield f"it uses {', '.join(others)}, which cannot be merged into weights here"


def has_plain_factors(config: Mapping[str, Any]) -> bool:
    """Return True if each change of a weight is one scaled product of factors. config: adapter_config.json."""
    used = {name for name, value in config.items() if value and (name, value) != ("bias", "none")}
    return used <= _PLAIN | _BESIDE and config.get("init_lora_weights", True) in _PLAINLY_INITIALISED


def scaling_of(config: Mapping[str, Any]) -> float:
    """Return the factor of the product of an adapter's factors. config: adapter_config.json.

    alpha / rank (arXiv:2106.09685, section 4.1); rank-stabilised alpha / sqrt(rank) (arXiv:2312.03732).
    """
    alpha, rank = config["lora_alpha"], config["r"]
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def base_folder(config: Mapping[str, Any]) -> Path | None:
    """Return the folder of the adapter's base model, if its adapter_config.json names an existing one."""
    named = config.get("base_model_name_or_path")
    return Path(named) if isinstance(named, str) and named and Path(named).is_dir() else None
