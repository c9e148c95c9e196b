"""Checks whether a model's config.json is trainable, from the file alone. Loads no torch.

Its interpretation by the class of its model_type is checked by `require_fit` in models/weights.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from rlhf_core.errors import did_you_mean
from rlhf_core.models.folders.folder import GENERATION_CONFIG, num_labels, text_config
from rlhf_core.models.folders.remote_code import REMOTE_CODE, known_model_types

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "head_dim",
)  # fmt: skip
_POSITION_NUMBERS = ("rope_theta", "factor", "original_max_position_embeddings")
_SAMPLING_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_QUANTISED = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
_MAX_SIZE = 2**31 - 1
_MAX_LABELS = 2**16  # transformers makes a name for each of them, whatever the model is for
_HEAD = "ForSequenceClassification"  # how the names of the classes with a `score` end
# Settings of the computation, which are the recipe's.
_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_ALWAYS_THERE = (None, "eager", "sdpa")
# Divisors in a forward, which would make NaN of the logits; those in a class's __init__ raise an error there.
_DIVISORS = ("final_logit_softcapping", "log_scaling_n_floor", "logits_mup_width_multiplier", "logits_scaling")
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_OF_THE_CLASS = ("sub_configs", "attribute_map")


def config_problems(config: Mapping[str, Any], *, reward_model: bool) -> Iterator[str]:
    """Yield one sentence each, as in models/folders/check.py."""
    kind = config.get("model_type")
    if kind is None:
        yield "config.json does not name a model_type"
        return
    if any(config.get(name) is not None for name in _QUANTISED):
        yield "the weights are quantised; give the full ones"
    is_known = isinstance(kind, str) and kind in known_model_types()
    if not isinstance(config.get("auto_map", {}), dict):
        yield "config.json: `auto_map` is not an object: remove it"
    elif not is_known and config.get("auto_map"):
        yield REMOTE_CODE  # many configs keep one of the time before transformers had the class: those load without
    elif not is_known:
        nearest = did_you_mean(str(kind), known_model_types())
        yield f"config.json: transformers knows no model_type {kind!r}{nearest}: correct it, or take another model"
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield "config.json: `architectures` must be a list of class names: correct it or remove it"
    elif reward_model:
        yield from _head_problems(config)
    if config.get("transformers_weights") is not None:
        yield "config.json: `transformers_weights` names other weights than those of this folder: remove it"
    if (name := _nan(config)) is not None:
        yield f"config.json: {name} is NaN: fetch config.json again"
    if not isinstance(config.get("text_config", {}), dict):
        yield "config.json: `text_config` must be an object: fetch config.json again"
        return
    yield from _how_problems(config, "")
    yield from _how_problems(config.get("text_config", {}), "text_config.")
    yield from _number_problems(text_config(config))
    yield from _position_problems(text_config(config))


def _head_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why a reward model is no sequence classifier with one label."""
    names = config.get("architectures") or []
    if not any(name.endswith(_HEAD) for name in names):
        stated = f"names {names[0]}" if names else "is missing"
        yield (
            f"config.json: `architectures` {stated}, and a reward model is a sequence classifier (…{_HEAD}), which has "
            "a head `score`: give one that was saved as this class, or train one by a stage `reward_model`"
        )
    elif (labels := num_labels(config)) != 1:
        yield (
            f"config.json: the classifier has {labels} labels (`id2label`; 2 if it is left out), and a reward model "
            "has one: take another, or correct it"
        )


def _how_problems(config: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yield settings of loading, not of a model, which would still be read from its config.json."""
    if config.get("return_dict", True) is not True:
        shown = json.dumps(config["return_dict"])
        yield f"config.json: `{place}return_dict` is {shown}, and training reads the outputs by name: remove it"
    if config.get("output_attentions"):
        yield f"config.json: `{place}output_attentions` asks for what eager attention alone gives: remove it"
    if config.get("use_bidirectional_attention") is True:
        yield (
            f"config.json: `{place}use_bidirectional_attention` is true, so tokens see those after them, and there are "
            "no log-probs to train: give a causal language model"
        )
    for name in _IMPLEMENTATIONS:
        if (value := config.get(name)) not in _ALWAYS_THERE:
            yield f"config.json: `{place}{name}` is {json.dumps(value)}; the recipe says how to compute: remove it"
    for name in ("dtype", "torch_dtype"):
        if isinstance(value := config.get(name), str) and value not in _DTYPES:
            shown = f"config.json: `{place}{name}` is {json.dumps(value)}"
            yield f"{shown}, and weights are float64, float32, float16 or bfloat16: correct it"
    for name in _OF_THE_CLASS:
        if name in config:
            yield f"config.json: `{place}{name}` belongs to transformers' class, not to a model: remove it"


def _nan(config: Mapping[str, Any], place: str = "") -> str | None:
    """Return the path of a setting that is NaN. Infinity may be valid: it is a limit of the time steps of state-space
    models.
    """
    for name, value in config.items():
        if isinstance(value, Mapping) and (nested := _nan(value, f"{place}{name}.")) is not None:
            return nested
        if isinstance(value, float) and math.isnan(value):
            return f"{place}{name}"
    return None


def _number_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if name in _DIVISORS and _is_number(value) and value == 0:
            yield f"config.json: {name} is {json.dumps(value)}, and the model divides by it: correct it"
        if name == "query_pre_attn_scalar" and _is_number(value) and value <= 0:
            yield f"config.json: {name} is {value}; it must be above 0: correct it"
        if _is_share(name) and _is_number(value) and not 0 <= value <= 1:
            yield f"config.json: {name} is {value}; it must be from 0 to 1: correct it"
    labels = config.get("num_labels")
    if isinstance(labels, int) and labels > _MAX_LABELS:
        yield f"config.json: num_labels is {labels}, and no model has more than {_MAX_LABELS}: remove it"
    sizes: dict[str, int] = {}
    for name in SIZES:
        value = config.get(name)
        if isinstance(value, list) or value is None:  # some architectures have one for each layer
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
            # -1 or 0 means in some configs that there is none
            if name in ("max_position_embeddings", "intermediate_size", "head_dim") and value in (0, -1):
                continue
            yield f"config.json: {name} is {value!r}; it must be a whole number above 0: fetch config.json again"
        else:
            sizes[name] = value
    yield from _token_problems("config.json", config, sizes.get("vocab_size"))


def _token_problems(file: str, config: Mapping[str, Any], vocabulary: int | None) -> Iterator[str]:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is None or (name == "pad_token_id" and token == -1):
                continue
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                yield f"{file}: {name} is {token!r}, which is not a token: correct it"
            elif vocabulary is not None and token >= vocabulary:
                yield (
                    f"{file}: {name} is {token}, but the vocabulary ends at {vocabulary - 1} (vocab_size): correct one "
                    "of them"
                )


def generation_problems(config: Mapping[str, Any], vocabulary: int | None) -> Iterator[str]:
    """Yield a problem for each of a generation_config.json's settings that prevents sampling.

    vocabulary: rows of the model's embedding, if known.
    """
    pad = config.get("pad_token_id")
    padded = not isinstance(pad, int) or pad >= 0  # a negative one means in some configs that there is none
    tokens = config if padded else {name: value for name, value in config.items() if name != "pad_token_id"}
    yield from _token_problems(GENERATION_CONFIG, tokens, vocabulary)
    for name in _SAMPLING_NUMBERS:
        value = config.get(name)
        if value is not None and not _is_number(value):
            yield f"{GENERATION_CONFIG}: {name} is {value!r}, which is not a number: correct it or remove it"


def _position_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield rotary positions without valid angles: transformers computes NaN with them, or fails."""
    nested = [name for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), Mapping)]
    places = [("", config), *((f"{name}.", config[name]) for name in nested)]
    for name in nested:  # some architectures have one for each kind of layer
        places += [(f"{name}.{kind}.", part) for kind, part in config[name].items() if isinstance(part, Mapping)]
    for place, settings in places:
        for name in _POSITION_NUMBERS if place else ("rope_theta",):
            value = settings.get(name)
            if value is None or (_is_number(value) and not value <= 0):
                continue
            yield f"config.json: {place}{name} is {value!r}; it must be a number above 0: fetch config.json again"


def _is_share(name: str) -> bool:
    """Return whether a setting of this name is from 0 to 1: a norm's epsilon, a dropout probability."""
    return name.endswith(("_eps", "_epsilon", "dropout", "pdrop", "dropout_prob", "dropout_rate"))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
