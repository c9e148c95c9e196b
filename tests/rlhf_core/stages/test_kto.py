"""The KTO stage: what it learns and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.kto import KTOConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.stages import kto
from tests.rlhf_core.stages.supervised_runs import ENGINE, base_model, context_of, dataset, inline, no_cluster, pairs

pytestmark = pytest.mark.parts

SETTINGS: dict[str, Any] = {
    "dataset": "d", "batch_size": 8, "epochs": 3, "max_length": 32, "log_every": 1, "engine": ENGINE, "beta": 0.5,
    "optimizer": {"learning_rate": 5e-3, "warmup_share": 0.0, "schedule": "constant"},
    "validation": {"dataset": "v", "every_steps": 4, "metric": "accuracy"},
}  # fmt: skip
Inputs = dict[str, Input]


def labelled(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs(count)
        for side in ("chosen", "rejected")
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    rows = labelled(40)
    return {
        "model": base_model(folder / "base"), "dataset": dataset(folder / "d", rows[:45]),
        "validation.dataset": dataset(folder / "v", rows[60:]),
    }  # fmt: skip


@pytest.mark.endurance("architectures")
@pytest.mark.slow("trains until it has learned")
def test_it_learns_which_completions_are_good(inputs: Inputs, tmp_path: Path) -> None:
    context = context_of(tmp_path, inputs)
    output = kto.run(KTOConfig.model_validate(SETTINGS), inputs, context, inline)
    assert output.kind == Kind.POLICY
    assert (output.metrics["desirable_rows"], output.metrics["undesirable_rows"]) == (23, 22)
    first, last = ([m for _, m in context.logs if "loss" in m][place] for place in (0, -1))
    assert first["loss"] == pytest.approx(0.5)
    assert first["kl"] == 0.0
    assert last["desirable_reward"] > 0.5 > -0.5 > last["undesirable_reward"]
    assert [m for _, m in context.logs if "validation/accuracy" in m][-1]["validation/accuracy"] == 1.0


@pytest.mark.parametrize("label", [True, False])
def test_one_label_teaches_nothing(inputs: Inputs, tmp_path: Path, label: bool) -> None:
    rows = [row for row in labelled(10) if row["label"] is label]
    given = {**inputs, "dataset": dataset(tmp_path / "d", rows)}
    with pytest.raises(StageError, match=f"every row has the label {str(label).lower()}: KTO learns what tells"):
        kto.run(KTOConfig.model_validate(SETTINGS), given, context_of(tmp_path / "run", given), no_cluster)


def test_a_validation_set_of_one_row_has_no_kl(inputs: Inputs, tmp_path: Path) -> None:
    given = {**inputs, "validation.dataset": dataset(tmp_path / "v", labelled(10)[:1])}
    with pytest.raises(StageError, match=r"validation.dataset: it has one row that fits, but the KL is estimated with"):
        kto.run(KTOConfig.model_validate(SETTINGS), given, context_of(tmp_path / "run", given), no_cluster)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 1}, "set 2 or more"),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, "nothing would be trained"),
        ({"reference": {"engine": {"dtype": "bfloat16"}}}, "reference.engine.dtype is bfloat16"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        KTOConfig.model_validate({**SETTINGS, **settings})
    assert message in str(caught.value)
