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

from rlhf_core.errors import StageError
from rlhf_core.models.class_config import bias_settings, class_problems, may_tie_head, ties_head
from rlhf_core.models.config_check import config_problems, generation_problems
from rlhf_core.models.expected_tensors import tensor_problem
from rlhf_core.models.folder import GENERATION_CONFIG, text_config
from rlhf_core.models.headers import FLOATS, StoredTensor, read_object, same_content, stored_tensors

_OTHER_JSON = (
    GENERATION_CONFIG, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
# Names of the parts in the checkpoints of the architectures that transformers knows.
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")
_NORM = re.compile(r"\.(input_layernorm|ln_1)\.weight$")
_SIZED_PARTS = (  # settings whose product is the first size of a tensor, which has so many dimensions
    (("vocab_size",), _EMBEDDING, "rows", 2),
    (("hidden_size",), _NORM, "numbers", 1),
)
_SIZED_LAYERS = (  # where all layers are alike
    (("intermediate_size",), re.compile(r"\.mlp\.(gate|up)_proj\.weight$"), "rows", 2),
    (("num_attention_heads", "head_dim"), re.compile(r"\.self_attn\.q_proj\.weight$"), "rows", 2),
    (("num_key_value_heads", "head_dim"), re.compile(r"\.self_attn\.[kv]_proj\.weight$"), "rows", 2),
)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
# Parts of a layer that no class leaves out in some layers alone, where all are of one type.
_IN_EVERY_LAYER = re.compile(
    r"^(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|input_layernorm|post_attention_layernorm)\.weight$"
)
_ANY_HEAD = re.compile(r"head|embed_out|output|logits")  # also of classes whose stored names are others
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
            content = read_object(folder / name)
            if name == GENERATION_CONFIG:
                yield from generation_problems(content, None if config is None else vocabulary_size(config))
        except StageError as error:
            yield str(error)
    if config is not None:
        problems = list(config_problems(config, reward_model=reward_model))
        if not problems and tensors is not None:
            problems = list(_misfits(text_config(config), tensors))
        yield from problems
    if reward_model and tensors is not None:
        yield from _score_problems(tensors)


def class_config_problems(settings: Mapping[str, Any], folder: Path, *, reward_model: bool = False) -> Iterator[str]:
    """Of a folder without `folder_problems`: one sentence for each problem of `settings`, which are what `class_config`
    gives of it. reward_model: without an output head. Raises StageError as `stored_tensors`."""
    tensors = stored_tensors(folder)
    problems = [*class_problems(settings), *_misfits(settings, tensors, layers=True), *_biases(settings, tensors)]
    problems = problems or [*_unlike_layers(settings, tensors), *_lacking_ends(tensors)]
    problems = problems or list(() if reward_model else _headless(settings, tensors))
    if not problems and (problem := tensor_problem(settings, tensors, reward_model=reward_model)) is not None:
        problems = [f"the weights are not those of config.json: {problem}: give config.json and weights of one model"]
    yield from problems or _untied(settings, folder, tensors)


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding; None if config.json leaves it to the model's class."""
    size = text_config(config).get("vocab_size")
    return size if isinstance(size, int) else None


def _misfits(text: Mapping[str, Any], tensors: Mapping[str, StoredTensor], *, layers: bool = False) -> Iterator[str]:
    """Where config.json and the weights are of two models. layers: also the sizes of what is in them."""
    if text["model_type"] in _OTHER_COUNTS:
        return
    sized_parts = _sized_parts(text, layers=layers)
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
        for settings, part, unit, dimensions, wanted in sized_parts:
            found = tensor.shape[:1]
            if part.search(name) and len(tensor.shape) == dimensions and found != (wanted,) and settings not in told:
                told.add(settings)
                yield (
                    f"config.json says {settings}, but {where} has {found[0]} {unit}: "
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


def _sized_parts(text: Mapping[str, Any], *, layers: bool) -> list[tuple[str, re.Pattern[str], str, int, int]]:
    """Settings as a message has them, names of tensors, what the first size counts, dimensions, and that size."""
    sizes = dict(text)
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        sizes["head_dim"] = text.get("head_dim") or hidden // heads
    alike = "per_layer_config" not in text and all(name == "head_dim" or not name.endswith("head_dim") for name in text)
    found = []
    for names, part, unit, dimensions in (*_SIZED_PARTS, *(_SIZED_LAYERS if layers and alike else ())):
        values = [value for name in names if isinstance(value := sizes.get(name), int)]
        if len(values) == len(names):
            said = " and ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
            found.append((said, part, unit, dimensions, math.prod(values)))
    return found


def _score_problems(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    head = tensors.get("score.weight")
    if head is None:
        others = [name for name in tensors if re.search(r"head|score|classifier", name) and ".layers." not in name]
        found = f" (there is {', '.join(sorted(others)[:3])})" if others else ""
        yield f"the weights have no score.weight, the head that a reward is read from{found}: give a reward model"
    elif head.shape[:1] != (1,):
        yield f"score.weight in {head.file} has {head.shape[0]} rows, and a reward model has one label: take another"


def _biases(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """One sentence for each setting by which layers have biases that the weights lack, or have none that they have."""
    asked = bias_settings(settings)
    told: set[str] = set()
    for name in tensors:
        layer, _, last = name.rpartition(".")
        setting = asked.get(layer.rpartition(".")[2])
        if setting is None or setting in told or last != "weight":
            continue
        if ".experts." in name or _BESIDE_THE_TEXT.search(name):  # modules of other classes
            continue
        given, stored = settings.get(setting), f"{layer}.bias" in tensors
        if isinstance(given, bool) and given != stored:
            told.add(setting)
            yield (
                f"config.json: {setting} is {json.dumps(given)}, and the weights have {'a' if stored else 'no'} "
                f"{layer}.bias: give config.json and weights of one model"
            )


def _untied(settings: Mapping[str, Any], folder: Path, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Where config.json makes one what the weights have two of."""
    if not ties_head(settings):
        return
    heads, embeddings = ([name for name in tensors if part.search(name)] for part in (_HEAD, _EMBEDDING))
    if len(heads) == len(embeddings) == 1 and not same_content(folder, tensors, heads[0], embeddings[0]):
        yield (
            f"config.json makes {heads[0]} one with {embeddings[0]}, but the weights have another tensor of each: set "
            "tie_word_embeddings false in config.json"
        )


def _headless(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Where config.json asks for an output head that the weights do not have."""
    if ties_head(settings) or not may_tie_head(settings) or "text_config" in settings:
        return  # of a model with a vision encoder two configs say so
    embedding = next((name for name in tensors if _EMBEDDING.search(name)), None)
    beside_layers = [name for name in tensors if not any(_stacks(name))]
    if embedding is not None and not any(_ANY_HEAD.search(name) for name in beside_layers):
        yield (
            f"config.json: tie_word_embeddings is false (or left out), but the weights have no output head beside "
            f"{embedding}: set it true if the head is the embedding, or fetch the weights again"
        )


def _unlike_layers(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """One sentence for each layer that lacks a tensor which all others of its type have."""
    if any(re.search(r"expert|moe|shared|cross|block_type|hybrid|attn_layer|per_layer", name) for name in settings):
        return  # their layers are not alike
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in tensors:
        place = None if _BESIDE_THE_TEXT.search(name) else next(_stacks(name), None)
        if place is not None and _IN_EVERY_LAYER.search(name[place.end() :]):
            stacks[place[1]][int(place[2])].add(name[place.end() :])
    types = settings.get("layer_types")
    for stack, layers in sorted(stacks.items()):
        kinds: dict[str, list[int]] = defaultdict(list)
        for index in sorted(layers):
            kinds[str(types[index]) if isinstance(types, list) and index < len(types) else ""].append(index)
        for alike in kinds.values():
            for index in alike:
                others = [layers[other] for other in alike if other != index]
                lacking = sorted(set.intersection(*others) - layers[index]) if others else []
                if lacking:
                    yield (
                        f"the weights have no {stack}.{index}.{lacking[0]}, which the other layers have: fetch the "
                        "folder again"
                    )


def _lacking_ends(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Where there are layers alone: without the embedding before them, or the norm behind them. Of classes with the
    usual names."""
    if not any(name.endswith(".input_layernorm.weight") for name in tensors):
        return
    beside_layers = [name for name in tensors if not any(_stacks(name))]
    if not any(re.search(r"emb|wte", name) for name in beside_layers):
        yield "the weights have no embedding, such as model.embed_tokens.weight: fetch the folder again"
    if not any(re.search(r"norm|ln_f", name) for name in beside_layers):
        yield "the weights have no norm behind the layers, such as model.norm.weight: fetch the folder again"


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
