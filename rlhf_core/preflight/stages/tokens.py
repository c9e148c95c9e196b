"""Comparison of two models' tokenizers."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.stages.base_model import FolderModel, ScratchModel
from rlhf_core.preflight.model import BaseModel


def same_tokens(model: BaseModel, other: BaseModel, root: Path) -> bool | None:
    """Return whether the tokenizers of two models are equal; None if only their jobs can compare them."""
    match model.config.source, other.config.source:
        case ScratchModel(words=words), ScratchModel(words=other_words):
            return tuple(dict.fromkeys(words)) == tuple(dict.fromkeys(other_words))
        case FolderModel(path=path), FolderModel(path=other_path):
            return (root / path / "tokenizer.json").read_bytes() == (root / other_path / "tokenizer.json").read_bytes()
        case _:
            return None
