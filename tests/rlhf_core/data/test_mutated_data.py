"""`plan` and the dataset stage agree on thousands of broken files."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.data.sources import FilesSource
from rlhf_core.data.formats import format_of
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import ConversationError, StageError
from rlhf_core.preflight.samples import Sample, read_samples
from rlhf_core.stages.dataset import run
from tests.mutations import PATIENCE, examples
from tests.rlhf_core.chat.families import WITH_TOOLS, byte_level
from tests.rlhf_core.data.mutations import mutated_file
from tests.rlhf_core.stages.context import LocalContext

pytestmark = [pytest.mark.endurance("mutations"), PATIENCE]
TOKENIZER = byte_level(WITH_TOOLS)


def planned(config: DatasetConfig, root: Path) -> Sample:
    recipe: Any = SimpleNamespace(data={"d": config})
    return read_samples(recipe, ["d"], root)["d"]


def compare(seed: int, folder: Path, policy: str) -> str:
    """What became of the file: `refused`, or `read`. Fails if plan and stage differ."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file = mutated_file(seed)
    (folder / file.name).write_bytes(file.content)
    config = DatasetConfig.model_validate(
        {
            "format": file.data_format,
            "source": FilesSource(type="files", paths=(file.name,)),
            "on_bad_row": policy,
            "near_duplicates": "off",
        }
    )
    sample = planned(config, folder)
    for sentence in (*sample.problems, *([sample.bad.sentence()] if sample.bad.count else [])):
        assert sentence.isprintable(), sentence
        assert file.name in sentence, sentence
    context = LocalContext(folder / "work", user_files_root=folder, name="data.d", given_seed=0)
    if sample.problems:
        with pytest.raises(StageError):
            run(config, {}, context)
        return "refused"
    output = run(config, {}, context)
    assert output.metrics["read"] == len(sample.rows)
    assert output.metrics["bad_rows"] == sample.bad.count
    data_format = format_of(file.data_format)
    rows = read_rows(output.folder)
    assert {row["id"] for row in rows} <= {row["id"] for _, row in sample.rows}  # without duplicates
    for row in rows:
        data_format.asked_text(row), data_format.whole_text(row)
        try:
            data_format.num_tokens(TOKENIZER, row)
        except ConversationError as error:
            assert str(error)  # noqa: PT017  the stage that reads the row says so
    return "read"


@examples(150)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["error", "drop"]))
def test_plan_and_stage_agree_about_a_mutated_file(
    tmp_path_factory: pytest.TempPathFactory, seed: int, policy: str
) -> None:
    compare(seed, tmp_path_factory.getbasetemp() / "mutated", policy)
