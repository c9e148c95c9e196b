"""What is in a model folder, beside its weights. Loads no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rlhf_core.config.base import Dtype
from rlhf_core.errors import StageError
from rlhf_core.models.headers import read_object

ADAPTER = "adapter"  # of a reward model that was trained as one: the folder with it, beside the merged weights
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt", "*.model",
)  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """Its config.json. Raises StageError if there is none, or no JSON object in it."""
    try:
        return read_object(folder / "config.json")
    except StageError as error:
        raise StageError(f"{folder}: {error}") from error


def update_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stored_dtype(folder: Path) -> Dtype:
    """The precision that the weights were saved in. Raises StageError if that is none of ours."""
    config = read_config(folder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in ("float32", "bfloat16"):
        raise StageError(f"{folder}/config.json: the model's dtype is {dtype!r}; expected float32 or bfloat16")
    return "float32" if dtype == "float32" else "bfloat16"


def context_length(folder: Path) -> int | None:
    """The longest sequence that the model was made for, in tokens; None where its config does not say."""
    length: int | None = read_config(folder).get("max_position_embeddings")
    return length


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files of a model folder."""
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                # Contents only: a source fetched from the store is read-only, the copy must not be.
                shutil.copyfile(path, folder / path.name)
