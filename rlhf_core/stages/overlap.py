"""Overlap: a training dataset, and the recipe's validation and evaluation sets, compared row by row.

Stages that train on it wait for this stage without reading its result, so that another evaluation set costs one more
comparison and no training. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data.dataset import OverlapConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.overlap import overlap_problem
from rlhf_core.data.reading import read_dataset
from rlhf_core.errors import StageError

_PREFIX = "held_out."


def run(config: OverlapConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Compare the datasets.

    Raises StageError with the number of rows that contain a held-out prompt, and three of them.
    """
    trained = read_dataset(inputs["dataset"].folder)
    held_out = {
        name.removeprefix(_PREFIX): read_dataset(dataset.folder)
        for name, dataset in inputs.items()
        if name.startswith(_PREFIX)
    }
    names = sorted(held_out)
    context.progress(0, 0, "comparing")
    rows = ((f"row {row['id']}", row) for row in trained.rows)
    if (problem := overlap_problem(rows, trained.format, held_out, excluded={})) is not None:
        raise StageError(f"{context.name}: {problem}")
    folder = context.workdir / "overlap"
    folder.mkdir()
    (folder / "overlap.json").write_text(json.dumps({"held_out": names}) + "\n", encoding="utf-8")
    return Output(Kind.REPORT, folder)
