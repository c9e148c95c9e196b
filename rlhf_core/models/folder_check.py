"""Is a model folder whole? As far as its JSON files and the headers of its weights say: loads no torch.

What only the model's class knows, the shape of every tensor, `models/weights.py` compares in the job of the base stage.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import StageError, did_you_mean
from rlhf_core.models.folder import text_config
from rlhf_core.models.headers import FLOATS, StoredTensor, read_object, stored_tensors
from rlhf_core.models.remote_code import REMOTE_CODE, causal_model_types, known_model_types, needs_remote_code

UNFIT_GENERATION_CONFIG = "generation_config.json is not what transformers expects: correct it or remove it"
_OTHER_JSON = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "head_dim",
)  # fmt: skip
_POSITION_NUMBERS = ("rope_theta", "factor", "original_max_position_embeddings")
_QUANTISED = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
_MAX_SIZE = 2**31 - 1
# Names of the parts in the checkpoints of the architectures that transformers knows.
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")
_NORM = re.compile(r"\.(input_layernorm|ln_1)\.weight$")
_SIZED_PARTS = (("vocab_size", _EMBEDDING, "rows", 2), ("hidden_size", _NORM, "numbers", 1))
_STACKED = re.compile(r"^(.*\b(?:layers|h|blocks|experts))\.(\d+)\.")
_BESIDE_THE_TEXT = re.compile(
    r"vision|visual|audio|image|video|mtp|encoder|tower|shared_transf|nextn|code_predictor|talker|per_layer"
)
_OTHER_COUNTS = frozenset({"hrm_text", "mllama", "moshi"})  # their layers, or rows, are others than config.json says
_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def folder_problems(folder: Path, *, reward_model: bool = False) -> Iterator[str]:
    """One sentence each: the file, what is wrong with it, what to do. reward_model: with a `score` head."""
    try:
        if not folder.is_dir():
            kind = "this is a file; give the folder that it is in" if folder.is_file() else "there is no such folder"
            yield f"{kind} (looked for {folder})"
            return
        listed = {path.name for path in folder.iterdir()}
    except (OSError, ValueError) as error:
        yield f"this folder cannot be read ({getattr(error, 'strerror', None) or error}): correct it or its permissions"
        return
    config, tensors = None, None
    if "config.json" not in listed and "adapter_config.json" not in listed:
        yield "there is no config.json in this folder, so it is no model folder"
    elif "config.json" in listed:
        try:
            config = read_object(folder / "config.json")
        except StageError as error:
            yield str(error)
    try:
        tensors = stored_tensors(folder)
        if "adapter_config.json" in listed:
            yield "there is a model here and an adapter beside it (adapter_config.json): merge it, or take it away"
    except StageError as error:
        yield str(error)
    for name in sorted(listed & set(_OTHER_JSON)):
        try:
            read_object(folder / name)
        except StageError as error:
            yield str(error)
    if config is not None:
        problems = list(_config_problems(config, reward_model=reward_model))
        if not problems and tensors is not None and config["model_type"] not in _OTHER_COUNTS:
            problems = list(_misfits(text_config(config), tensors))
        yield from problems


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding; None if config.json leaves it to the model's class."""
    size = text_config(config).get("vocab_size")
    return size if isinstance(size, int) else None


def _config_problems(config: Mapping[str, Any], *, reward_model: bool) -> Iterator[str]:
    kind = config.get("model_type")
    if kind is None:
        yield "config.json does not name a model_type"
        return
    if any(config.get(name) is not None for name in _QUANTISED):
        yield "the weights are quantised; give the full ones"
    if not isinstance(config.get("auto_map", {}), dict):
        yield "config.json: `auto_map` is no object: remove it"
    elif needs_remote_code(config):
        yield REMOTE_CODE
    elif not isinstance(kind, str) or kind not in known_model_types():
        nearest = did_you_mean(str(kind), known_model_types())
        yield f"config.json: transformers knows no model_type {kind!r}{nearest}: correct it, or take another model"
    elif kind not in causal_model_types() and not reward_model:
        yield f"config.json: a model of model_type {kind!r} is no causal language model: take one that is"
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield "config.json: `architectures` must be a list of class names: correct it or remove it"
    if config.get("return_dict", True) is not True:
        given = json.dumps(config["return_dict"])
        yield f"config.json: `return_dict` is {given}, and training reads the outputs by name: remove it"
    if config.get("transformers_weights") is not None:
        yield "config.json: `transformers_weights` names other weights than those of this folder: remove it"
    if (name := _nan(config)) is not None:
        yield f"config.json: {name} is NaN: fetch config.json again"
    if not isinstance(config.get("text_config", {}), dict):
        yield "config.json: `text_config` must be an object: fetch config.json again"
        return
    yield from _number_problems(text_config(config))
    yield from _position_problems(text_config(config))


def _nan(config: Mapping[str, Any], place: str = "") -> str | None:
    """Where a setting is no number. Infinity may be meant: the time steps of state-space models have it as a limit."""
    for name, value in config.items():
        if isinstance(value, Mapping) and (found := _nan(value, f"{place}{name}.")) is not None:
            return found
        if isinstance(value, float) and math.isnan(value):
            return f"{place}{name}"
    return None


def _number_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if name.endswith(("_eps", "_epsilon")) and isinstance(value, int | float) and not 0 <= value <= 1:
            yield f"config.json: {name} is {value}; it must be from 0 to 1: correct it"
    sizes: dict[str, int] = {}
    for name in _SIZES:
        value = config.get(name)
        if isinstance(value, list) or value is None:  # some architectures have one for each layer
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
            # -1 or 0 is how some configs say that there is no such thing.
            if name in ("max_position_embeddings", "intermediate_size", "head_dim") and value in (0, -1):
                continue
            yield f"config.json: {name} is {value!r}; it must be a whole number above 0: fetch config.json again"
        else:
            sizes[name] = value
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        for token in value if isinstance(value, list) else [value]:
            if token is None or (name == "pad_token_id" and token == -1):
                continue
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                yield f"config.json: {name} is {token!r}, which is no token: correct it"
            elif token >= sizes.get("vocab_size", _MAX_SIZE):
                yield (
                    f"config.json: {name} is {token}, but the vocabulary ends at {sizes['vocab_size'] - 1} "
                    "(vocab_size): correct one of them"
                )


def _position_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Rotary positions whose numbers give no angles: transformers computes NaN with them, or fails."""
    nested = [name for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), Mapping)]
    places = [("", config), *((f"{name}.", config[name]) for name in nested)]
    for name in nested:  # some architectures have one for each kind of layer
        places += [(f"{name}.{kind}.", part) for kind, part in config[name].items() if isinstance(part, Mapping)]
    for place, settings in places:
        for name in _POSITION_NUMBERS if place else ("rope_theta",):
            value = settings.get(name)
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and not value <= 0):
                continue
            yield f"config.json: {place}{name} is {value!r}; it must be a number above 0: fetch config.json again"


def _misfits(text: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Where config.json and the weights are of two models."""
    stacks: dict[str, set[int]] = defaultdict(set)
    told: set[str] = set()  # settings
    for name, tensor in tensors.items():
        where = f"{name} in {tensor.file}"
        if name.endswith(".weight") and tensor.dtype not in FLOATS:
            yield f"{where} has the dtype {tensor.dtype}, in which no model is trained: give the full weights"
            return
        if _BESIDE_THE_TEXT.search(name):
            continue
        for match in _stacks(name):
            stacks[match[1]].add(int(match[2]))
        for setting, part, unit, dimensions in _SIZED_PARTS:
            wanted, found = text.get(setting), tensor.shape[:1]
            fits = not isinstance(wanted, int) or found == (wanted,)
            if part.search(name) and len(tensor.shape) == dimensions and not fits and setting not in told:
                told.add(setting)
                yield (
                    f"config.json says {setting} {wanted}, but {where} has {found[0]} {unit}: "
                    "give config.json and weights of one model"
                )
    counts = (text.get(name) for name in _EXTRA_LAYERS)
    extra = sum(count for count in counts if isinstance(count, int))
    for stack, indices in sorted(stacks.items()):
        kind = stack.rpartition(".")[2]
        lacking = sorted(set(range(max(indices) + 1)) - indices)
        if lacking:
            yield f"the weights have {stack}.{max(indices)} but no {stack}.{lacking[0]}: fetch the folder again"
        elif kind != "experts" and not _STACKED.match(stack + "."):
            yield from _layers(stack, len(indices), text.get("num_hidden_layers"), extra)


def _stacks(name: str) -> Iterator[re.Match[str]]:
    """Every `layers.3.` in the name, with what stands before it."""
    for end in (match.end() for match in re.finditer(r"\.\d+\.", name)):
        found = _STACKED.match(name[:end])
        if found is not None and found.end() == end:
            yield found


def _layers(stack: str, stored: int, wanted: object, extra: int) -> Iterator[str]:
    if isinstance(wanted, int) and not wanted <= stored <= wanted + extra:
        yield (
            f"config.json says num_hidden_layers {wanted}, but the weights have {stored} ({stack}.…): "
            "give config.json and weights of one model"
        )
