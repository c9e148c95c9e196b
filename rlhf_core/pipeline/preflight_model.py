"""The base model before anything runs: can it be built, or is the folder whole?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.base_model import BaseModelConfig, FolderModel, ScratchModel
from rlhf_core.config.stage import StageConfig
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.rendering import NO_TEMPLATE
from rlhf_core.data.templates import TEMPLATE_FILE, check_templates, unfit_template
from rlhf_core.data.tokenizers import SPECIAL_TOKENS, word_level_tokenizer
from rlhf_core.models.headers import WEIGHTS_INDEX
from rlhf_core.models.remote_code import REMOTE_CODE, needs_remote_code
from rlhf_core.pipeline.outline import Draft


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that a run starts from, where its folder is at hand or it is made from scratch."""

    config: BaseModelConfig  # with a source of either kind
    context: int | None  # longest sequence in tokens; None: its config does not say


def check_bases(nodes: Mapping[str, Draft], root: Path) -> list[str]:
    """Problems of the base models; those of a remote one are seen by its job."""
    problems: list[str] = []
    for node in nodes.values():
        if isinstance(node.config, BaseModelConfig):
            problems += _check_base(node, node.config, nodes, root)
    return problems


def _check_base(node: Draft, config: BaseModelConfig, nodes: Mapping[str, Draft], root: Path) -> list[str]:
    templates = list(check_templates(config, root, node.section))
    if templates:
        return templates
    users = [other for other in nodes.values() if base_of(other, nodes) == node.name]
    match config.source:
        case ScratchModel(words=words, context_length=length):
            return [
                *(f"{node.section}.source: {problem}" for problem in _scratch(config.source)),
                *_experts(users, {}),
                *unfit_template(config, root, node.section, lambda: word_level_tokenizer(words, length)),
            ]
        case FolderModel(path=path) if "://" not in path:
            renders = any(other.stage.needs_template for other in users)
            found = [
                f"{node.section}.source.path: {path}: {problem}"
                for problem in _folder(root / path, needs_template=renders and not _brings_template(config))
            ]
            return found or [
                *_experts(users, _json(root / path / "config.json")),
                *unfit_template(config, root, node.section, lambda: load_tokenizer(root / path)),
            ]
        case _:
            return []


def base_of(node: Draft, nodes: Mapping[str, Draft]) -> str | None:
    """The node of the base model that `node` starts from, through the stages that trained it before."""
    while (model := node.inputs.get("model")) is not None:
        node = nodes[model]
    return node.name if isinstance(node.config, BaseModelConfig) else None


def models_of(nodes: Mapping[str, Draft], root: Path) -> dict[str, BaseModel]:
    """The base model of each node that starts from one at hand."""
    models: dict[str, BaseModel] = {}
    for node in nodes.values():
        base = base_of(node, nodes)
        model = _base_model(nodes[base].config, root) if base is not None else None
        if model is not None:
            models[node.name] = model
    return models


def _base_model(config: StageConfig, root: Path) -> BaseModel | None:
    assert isinstance(config, BaseModelConfig)
    match config.source:
        case ScratchModel(context_length=length):
            return BaseModel(config, length)
        case FolderModel(path=path) if "://" not in path:
            stored = _json(root / path / "config.json").get("max_position_embeddings")
            return BaseModel(config, stored if isinstance(stored, int) else None)
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


def _folder(folder: Path, *, needs_template: bool) -> Iterator[str]:
    if not folder.is_dir():
        yield f"there is no such folder (looked for {folder})"
        return
    yield from _config(folder)
    yield from _weights(folder)
    if not (folder / "tokenizer.json").is_file():
        yield "there is no tokenizer.json in this folder; save the tokenizer with transformers' save_pretrained"
    elif needs_template and not _has_template(folder):
        yield NO_TEMPLATE


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
    if needs_remote_code(config):
        yield REMOTE_CODE


def _experts(users: Sequence[Draft], config: Mapping[str, Any]) -> Iterator[str]:
    """users: the nodes that start from the model; config: the model's, none of one from scratch, which is dense."""
    if "num_experts_per_tok" in {**config, **config.get("text_config", {})}:
        return
    for node in users:
        for setting, coefficient in node.config.moe_coefficients().items():
            if coefficient > 0:
                asked = f"{node.section}.{setting} is {coefficient:g}"
                yield f"{asked}, but the base model has no experts to balance; set it 0"


def _weights(folder: Path) -> Iterator[str]:
    if (folder / WEIGHTS_INDEX).is_file():
        shards = set(_json(folder / WEIGHTS_INDEX).get("weight_map", {}).values())
        lacking = sorted(name for name in shards if not (folder / name).is_file())
        if lacking or not shards:
            yield f"of the weights, {', '.join(lacking) or 'everything'} that {WEIGHTS_INDEX} names is missing"
    elif not (folder / "model.safetensors").is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
        found = f" ({', '.join(others)} cannot be used: convert to safetensors)" if others else ""
        yield f"there are no weights in this folder: model.safetensors, or {WEIGHTS_INDEX} with its shards{found}"
    elif (folder / "model.safetensors").stat().st_size == 0:
        yield "model.safetensors is empty"


def _brings_template(config: BaseModelConfig) -> bool:
    return config.chat_template is not None or config.input_template is not None


def _has_template(folder: Path) -> bool:
    if (folder / TEMPLATE_FILE).is_file():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_json(settings).get("chat_template"))


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
