"""The comparison of a training dataset with held-out ones, as a stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data.dataset import OverlapConfig
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import write_dataset
from rlhf_core.errors import StageError
from rlhf_core.stages.overlap import run
from tests.rlhf_core.stages.context import LocalContext, local_input

pytestmark = pytest.mark.parts


def dataset(folder: Path, *questions: str) -> Input:
    rows = [{"id": f"id-{q}", "prompt": [{"role": "user", "content": q}]} for q in questions]
    write_dataset(folder, rows, {"format": "prompts"})
    return local_input(folder, Kind.DATASET)


def compare(tmp_path: Path, *asked: str) -> Output:
    inputs = {
        "dataset": dataset(tmp_path / "d", "a", "b", "c"),
        "held_out.near": dataset(tmp_path / "near", "x"),
        "held_out.far": dataset(tmp_path / "far", "y", *asked),
    }
    config = OverlapConfig(dataset="d", held_out=("near", "far"))
    return run(config, inputs, LocalContext(tmp_path / "work", name="overlap.d", given_seed=None))


def test_rows_with_a_held_out_prompt_are_refused_by_number(tmp_path: Path) -> None:
    with pytest.raises(StageError) as raised:
        compare(tmp_path, "c ", "a")
    assert str(raised.value) == (
        "overlap.d: 2 of 3 rows contain a prompt of a dataset that the recipe evaluates or validates on: "
        "row id-a contains 'a' of `far`; row id-c contains 'c' of `far`. "
        "Name that dataset in `exclude` to leave these rows out, or set on_overlap to `allow` to train on them"
    )


def test_without_overlap_it_writes_what_was_compared(tmp_path: Path) -> None:
    output = compare(tmp_path)
    assert output.kind is Kind.REPORT
    assert json.loads((output.folder / "overlap.json").read_text()) == {"held_out": ["far", "near"]}
