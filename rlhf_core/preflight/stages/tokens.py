"""Comparison of two models' tokenizers."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.stages.base_model import FolderModel, ScratchModel
from rlhf_core.preflight.model import BaseModel


def same_tokens(model: BaseModel, other: BaseModel, root: Path) -> bool | None:
    """Return whether the tokenizers of two models are equal; None if only their jobs can compare them."""
    match model.config.source, other.config.source:
        case ScratchModel(words=ours), ScratchModel(words=theirs):
            return tuple(dict.fromkeys(ours)) == tuple(dict.fromkeys(theirs))
        case FolderModel(path=ours), FolderModel(path=theirs):
            return (root / ours / "tokenizer.json").read_bytes() == (root / theirs / "tokenizer.json").read_bytes()
        case _:
            return None
