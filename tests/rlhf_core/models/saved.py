"""Folders of models whose weights are all in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from rlhf_core.models.loading import save_model


def save_state(model: nn.Module, state: Mapping[str, Tensor], folder: Path, tokenizer_folder: Path | None) -> None:
    """state: under the names that the folder will have."""
    save_model(model, state, state.items(), folder, tokenizer_folder)
