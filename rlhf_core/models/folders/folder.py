"""Files of a model folder other than its weights. Loads no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.base import Dtype
from rlhf_core.errors import StageError
from rlhf_core.models.folders.headers import read_object

Head = Literal["causal", "scalar"]  # logits over the vocabulary; one number a token, `score`

TEMPLATES = "additional_chat_templates"  # a folder with further chat templates, such as `tool_use.jinja`
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER = "adapter"  # of a reward model that was trained as one: the folder with it, beside the merged weights
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # of images
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", f"{TEMPLATES}/*.jinja", "vocab.*",
    "merges.txt", "*.model", *PROCESSOR_FILES,
)  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """Return its config.json. Raises StageError if there is none, or no JSON object in it."""
    try:
        return read_object(folder / "config.json")
    except StageError as error:
        raise StageError(f"{folder}: {error}") from error


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model, also if there is a vision model beside it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else dict(config)


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether config.json names a class with a score head: a reward model's."""
    names = config.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names
    )


def num_labels(config: Mapping[str, Any]) -> object:
    """Return the number of labels of a classifier's config.json, as transformers counts them: usually a whole
    number.
    """
    names = config.get("id2label")
    return len(names) if isinstance(names, Mapping) else config.get("num_labels") or 2


def update_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a mixture of experts."""
    return "num_experts_per_tok" in text_config(config)


def stored_dtype(folder: Path) -> Dtype:
    """Return the dtype of the stored weights. Raises StageError for an unsupported one."""
    config = read_config(folder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in ("float32", "bfloat16"):
        raise StageError(f"{folder}/config.json: the model's dtype is {dtype!r}; expected float32 or bfloat16")
    return "float32" if dtype == "float32" else "bfloat16"


def context_length(folder: Path) -> int | None:
    """Return the model's maximum sequence length, in tokens; None if its config does not contain it."""
    length: int | None = text_config(read_config(folder)).get("max_position_embeddings")
    return length


def longrope_limit(config: Mapping[str, Any]) -> int | None:
    """Return the length in tokens of a config.json beyond which `longrope` positions have other factors,
    arXiv:2402.13753; None for other positions.

    transformers chooses the factors by the longest sequence of a forward, vLLM once, by its maximum length.
    """
    text = text_config(config)
    for part in _position_settings(text):
        if part.get("rope_type", part.get("type")) in ("longrope", "su"):  # its name in older configs
            limit: int | None = part.get("original_max_position_embeddings")
            return limit or text.get("original_max_position_embeddings") or text.get("max_position_embeddings")
    return None


def depends_on_longest(config: Mapping[str, Any]) -> bool:
    """Return whether factors of positions depend on the longest sequence of a forward."""
    kinds = {part.get("rope_type", part.get("type")) for part in _position_settings(text_config(config))}
    return "dynamic" in kinds or longrope_limit(config) is not None


def _position_settings(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return [settings, *(value for value in settings.values() if isinstance(value, dict))]


def sampled_otherwise(config: Mapping[str, Any], tokens: int) -> str | None:
    """Return the reason why engines that serve sequences of `tokens` tokens compute other log-probs than the trainer;
    None if they do not.

    config: the model's config.json.
    """
    limit = longrope_limit(config)
    if limit is None or tokens < limit:  # the engine has room for one token more
        return None
    return (
        f"its positions (longrope) have other factors beyond {limit} tokens: an engine that has room for more uses "
        f"those for all sequences, the trainer for longer ones only; set it to {limit - 1} at most"
    )


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files of a model folder."""
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                # Contents only: a source fetched from the store is read-only, the copy must not be.
                target = folder / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
