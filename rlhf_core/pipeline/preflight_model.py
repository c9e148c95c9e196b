"""The base model before anything runs: can it be built, or is the folder whole?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.base_model import BaseModelConfig, FolderModel, ScratchModel
from rlhf_core.config.recipe import Recipe
from rlhf_core.data.tokenizers import SPECIAL_TOKENS

_INDEX = "model.safetensors.index.json"


def check_base(recipe: Recipe, root: Path) -> list[str]:
    """Problems of the base model; those of a remote one are seen by its job."""
    match recipe.base.source:
        case ScratchModel():
            return [
                *(f"base.source: {problem}" for problem in _scratch(recipe.base.source)),
                *_experts(recipe, {}),
            ]
        case FolderModel(path=path) if "://" not in path:
            found = [f"base.source.path: {path}: {problem}" for problem in _folder(recipe, root / path)]
            return found or list(_experts(recipe, _json(root / path / "config.json")))
        case _:
            return []


def context_length(base: BaseModelConfig, root: Path) -> int | None:
    """Longest sequence of the base model in tokens; None where that is not known before it is fetched."""
    match base.source:
        case ScratchModel(context_length=length):
            return length
        case FolderModel(path=path) if "://" not in path:
            stored = _json(root / path / "config.json").get("max_position_embeddings")
            return stored if isinstance(stored, int) else None
        case _:
            return None


def _scratch(source: ScratchModel) -> Iterator[str]:
    if source.hidden_size % (2 * source.heads):
        yield (
            f"hidden_size={source.hidden_size} must be heads={source.heads} times an even number; "
            f"the nearest is {max(1, round(source.hidden_size / (2 * source.heads))) * 2 * source.heads}"
        )
    if "" in source.words:
        yield "words: an empty string cannot be a token"
    for word in sorted(set(source.words) & set(SPECIAL_TOKENS)):
        yield f"words: {word} is a special token already"


def _folder(recipe: Recipe, folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"there is no such folder (looked for {folder})"
        return
    yield from _config(folder)
    yield from _weights(folder)
    if not (folder / "tokenizer.json").is_file():
        yield "there is no tokenizer.json in this folder; save the tokenizer with transformers' save_pretrained"
    elif _needs_template(recipe) and not _has_template(folder):
        yield (
            "the tokenizer has no chat template, which all stages but pre-training need; "
            "put a chat_template.jinja into the folder"
        )


def _config(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield "there is no config.json in this folder, so it is no model folder"
        return
    try:
        config = _json(folder / "config.json")
    except ValueError as error:
        yield f"config.json is not JSON ({error})"
        return
    if "model_type" not in config:
        yield "config.json does not name a model_type"
    if config.get("quantization_config"):
        yield "the weights are quantised; give the full ones"


def _experts(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[str]:
    """config: the model's, none of one from scratch, which is dense."""
    if "num_experts_per_tok" in {**config, **config.get("text_config", {})}:
        return
    asked: dict[str, float] = {}
    if recipe.pretrain is not None:
        asked["pretrain"] = recipe.pretrain.moe_coefficient
    if recipe.sft is not None:
        asked["sft"] = recipe.sft.moe_coefficient
    if recipe.rl is not None:
        asked[f"rl.{recipe.rl.block}"] = recipe.rl.settings.moe_coefficient
    for stage, coefficient in asked.items():
        if coefficient > 0:
            yield f"{stage}.moe_coefficient is {coefficient:g}, but the base model has no experts to balance; set it 0"


def _weights(folder: Path) -> Iterator[str]:
    if (folder / _INDEX).is_file():
        shards = set(_json(folder / _INDEX).get("weight_map", {}).values())
        lacking = sorted(name for name in shards if not (folder / name).is_file())
        if lacking or not shards:
            yield f"of the weights, {', '.join(lacking) or 'everything'} that {_INDEX} names is missing"
    elif not (folder / "model.safetensors").is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
        found = f" ({', '.join(others)} cannot be used: convert to safetensors)" if others else ""
        yield f"there are no weights in this folder: model.safetensors, or {_INDEX} with its shards{found}"
    elif (folder / "model.safetensors").stat().st_size == 0:
        yield "model.safetensors is empty"


def _needs_template(recipe: Recipe) -> bool:
    return any((recipe.sft, recipe.reward_model, recipe.rl, recipe.evaluation))


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_json(settings).get("chat_template"))


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
