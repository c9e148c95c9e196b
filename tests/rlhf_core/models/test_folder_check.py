"""What config.json and the headers of the weights say, before any weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_core.models.folder_check import folder_problems
from tests.rlhf_core.pipeline.recipes import model_folder


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters.rope_theta is 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "rope_parameters.rope_theta is '1e4'"),
        ({"rope_theta": -1e4}, "rope_theta is -10000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": True}}},
            "rope_parameters.full_attention.factor is True",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": "64"}},
            "rope_parameters.original_max_position_embeddings is '64'",
        ),
    ],
)
def test_positions_without_angles(tmp_path: Path, settings: dict[str, Any], place: str) -> None:
    model_folder(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert list(folder_problems(tmp_path / "model")) == [
        f"config.json: {place}; it must be a number above 0: fetch config.json again"
    ]


def test_weights_of_any_shape_are_floats(tmp_path: Path) -> None:
    model_folder(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    whole = numpy.ones(64, dtype=numpy.int64)
    save_file({**load_file(path), "model.norm.weight": whole}, path, metadata={"format": "pt"})
    assert list(folder_problems(tmp_path / "model")) == [
        "model.norm.weight in model.safetensors has the dtype I64, in which no model is trained: give the full weights"
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"return_dict": None},
            "config.json: `return_dict` is null, and training reads the outputs by name: remove it",
        ),
        (
            {"transformers_weights": "other.safetensors"},
            "config.json: `transformers_weights` names other weights than those of this folder: remove it",
        ),
    ],
)
def test_settings_by_which_transformers_loads_otherwise(
    tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    model_folder(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert list(folder_problems(tmp_path / "model")) == [expected]
