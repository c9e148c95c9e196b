"""Checks whether a model folder is complete, by its JSON files and the headers of its weights: loads no torch.

Properties known only to the model's class, such as the shape of every tensor, are checked by `require_fit` in
models/weights.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import StageError
from rlhf_core.models.folders.config_check import config_problems, generation_problems
from rlhf_core.models.folders.folder import GENERATION_CONFIG, text_config
from rlhf_core.models.folders.headers import FLOATS, StoredTensor, read_object, same_content, stored_tensors

_OTHER_JSON = (
    GENERATION_CONFIG, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # as architectures call their number


def folder_problems(folder: Path, *, reward_model: bool = False) -> Iterator[str]:
    """Yield one sentence each: the file, the problem, the remedy. reward_model: with a `score` head."""
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
        yield "there is no config.json in this folder, so it is not a model folder"
    elif "config.json" in listed:
        try:
            config = read_object(folder / "config.json")
        except StageError as error:
            yield str(error)
    try:
        tensors = stored_tensors(folder)
        if "adapter_config.json" in listed:
            yield "there is a model here and an adapter beside it (adapter_config.json): merge it, or remove it"
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
            problems = list(_tensor_problems(text_config(config), tensors))
        yield from problems
    if reward_model and tensors is not None:
        yield from _score_problems(tensors)


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return the rows of the embedding; None if config.json leaves it to the model's class."""
    size = text_config(config).get("vocab_size")
    return size if isinstance(size, int) else None


def untied_problem(folder: Path, tied: Mapping[str, str]) -> str | None:
    """Return the reason why the weights contradict config.json, which ties tensors that are both stored; None if they
    are equal.

    tied: name of the tensor that is left out -> name of the one that is used.
    """
    tensors = stored_tensors(folder)
    pairs = (pair for pair in tied.items() if not same_content(folder, tensors, *pair))
    return next((not_one(target, source) for target, source in pairs), None)


def not_one(target: str, source: str) -> str:
    return (
        f"config.json makes {target} one with {source}, but the weights have another tensor of each: set "
        "tie_word_embeddings false in config.json"
    )


def _tensor_problems(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield weights of an untrainable dtype, and a number of layers that would take all memory to build."""
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype not in FLOATS:
            where = f"{name} in {tensor.file}"
            yield f"{where} has the dtype {tensor.dtype}, in which no model is trained: give the full weights"
            return
    for name in _LAYERS:
        count = config.get(name)
        if isinstance(count, int) and count > len(tensors):
            yield (
                f"config.json says {name} {count}, but the weights have {len(tensors)} tensors: give config.json and "
                "weights of one model"
            )


def _score_problems(tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    head = tensors.get("score.weight")
    if head is None:
        others = [name for name in tensors if re.search(r"head|score|classifier", name) and ".layers." not in name]
        hint = f" (there is {', '.join(sorted(others)[:3])})" if others else ""
        yield f"the weights have no score.weight, the head that a reward is read from{hint}: give a reward model"
    elif head.shape[:1] != (1,):
        yield f"score.weight in {head.file} has {head.shape[0]} rows, and a reward model has one label: take another"
