"""Base models that cannot be built, and model folders that are not whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rlhf_core.pipeline.recipes import (
    Change,
    Problems,
    model_folder,
    put,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("base", "source", "heads", value=3), "base.source: hidden_size=128 must be heads=3 times an even number"),
        (put("base", "source", "words", value=["<eos>"]), "base.source: words: <eos> is a special token already"),
    ],
)
def test_one_thing_wrong_with_a_model_from_scratch_is_one_sentence(
    problems: Problems, change: Change, expected: str
) -> None:
    said = problems(change)
    assert any(expected in problem for problem in said), said


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            "base.source.path: model: there is no config.json in this folder",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "model: config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model: config.json does not name a model_type"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model: model.safetensors is empty"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "model: there are no weights in this folder: model.safetensors, or model.safetensors.index.json with its "
            "shards (pytorch_model.bin cannot be used: convert to safetensors)",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "m-1.safetensors"}}'
            ),
            "model: of the weights, m-1.safetensors that model.safetensors.index.json names is missing",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "model: there is no tokenizer.json"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "model: the tokenizer has no chat template"),
        (lambda folder: folder.rename(folder.with_name("moved")), "model: there is no such folder (looked for /"),
    ],
)
def test_a_model_folder_that_is_not_whole(problems: Problems, break_it: Callable[[Path], None], expected: str) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        model_folder(root)
        break_it(root / "model")

    said = problems(change)
    assert len(said) == 1
    assert expected in said[0]
