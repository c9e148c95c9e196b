"""Datasets that the stage makes of files of a test. Import it as tests.rlhf_core.stages.made_datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.contract import Input, Output
from rlhf_core.data.reading import read_rows
from rlhf_core.stages.dataset import run
from tests.rlhf_core.stages.context import LocalContext, local_input

SENTENCE = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
OTHER = "red blue green black white grey pink brown gold teal navy plum rust lime sand jade"
BAD_LINES = [
    b'{"prompt": "a"}', b"{", b'{"promt": "b"}', b"[1]", b'{"prompt": "\xff"}', b'{"prompt": "c"}', b'{"promt": "d"}',
    b'{"prompt": [{"role": "narrator", "content": "x"}]}', b'{"prompt": "\\ud800"}', b'{"prompt": "e", "x": NaN}',
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(
    tmp_path: Path,
    settings: dict[str, Any],
    *,
    seed: int = 0,
    exclude: Path | None = None,
    name: str = "work",
    pins: dict[str, str] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any], Path]:
    output = produce(tmp_path, settings, seed=seed, exclude=exclude, name=name, pins=pins)
    assert output.kind is Kind.DATASET
    info = json.loads((output.folder / "info.json").read_text())
    rows = read_rows(output.folder)
    assert output.metrics["rows"] == info["rows"] == len(rows)
    return rows, info, output.folder


def produce(
    tmp_path: Path,
    settings: dict[str, Any],
    *,
    seed: int = 0,
    exclude: Path | None = None,
    name: str = "work",
    pins: dict[str, str] | None = None,
) -> Output:
    inputs: dict[str, Input] = {}
    if exclude is not None:
        inputs["exclude.test"] = local_input(exclude, Kind.DATASET)
    context = LocalContext(tmp_path / name, user_files_root=tmp_path, name="data.train", given_seed=seed)
    context.pins = pins or {}
    return run(DatasetConfig.model_validate_json(json.dumps({"format": "prompts"} | settings)), inputs, context)


def files(*paths: str) -> dict[str, Any]:
    return {"type": "files", "paths": list(paths)}


def questions(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]
