"""Log-probs of the reference by a stage of their own: what is stored, and that preference learning is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.logprobs import LogprobsConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.contract import Input
from rlhf_core.errors import StageError
from rlhf_core.stages import logprobs, preference
from rlhf_core.stages.logprobs import preferred
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.preference import PreferenceWorker
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import ENGINE, base_model, context_of, dataset, inline, no_cluster, pairs
from tests.rlhf_core.stages.test_preference import SETTINGS, VALIDATION
from tests.rlhf_core.stages.test_preference import logprobs as logprobs_by_transformers

pytestmark = pytest.mark.parts

PAIRS = pairs(24)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    return {
        "model": base_model(folder / "base"), "reference.model": base_model(folder / "other", seed=1),
        "dataset": dataset(folder / "d", PAIRS[:16]), "validation.dataset": dataset(folder / "v", PAIRS[16:]),
    }  # fmt: skip


def read(folder: Path, model: Input, rows: Input, **settings: Any) -> Input:
    config = LogprobsConfig.model_validate({"dataset": "d", "max_length": 32, "engine": ENGINE, **settings})
    given = {"model": model, "dataset": rows}
    output = logprobs.run(config, given, context_of(folder, given, seed=None), inline)
    assert output.kind == Kind.LOGPROBS
    return local_input(output.folder, Kind.LOGPROBS)


def test_what_is_stored(inputs: dict[str, Input], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_EXAMPLES", 7)
    made = read(tmp_path, inputs["reference.model"], inputs["dataset"])
    lines = [json.loads(line) for line in (made.folder / "logprobs.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"row{index}" for index in range(16)]
    found = torch.tensor([line["logprobs"] for line in lines], dtype=torch.float64)
    assert torch.allclose(found, logprobs_by_transformers(inputs["reference.model"].folder, PAIRS[:16]), atol=1e-4)


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("trains twice")
def test_how_often_the_chosen_completion_is_preferred(inputs: dict[str, Input], tmp_path: Path) -> None:
    # The first pair by every measure, the second by the mean log-prob of its tokens alone; the third is a tie.
    lengths = ((2, 2), (4, 1), (1, 1))
    examples = [
        Example(f"row{i}", ([0] * 5, [0] * 5), tuple([True] * n for n in both), reference=(-1.0, -1.5))
        for i, both in enumerate(lengths)
    ]
    found = torch.tensor([[-1.0, -2.0], [-4.0, -3.0], [-2.0, -2.0]], dtype=torch.float64)
    metrics = preferred(examples, found)
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["token_accuracy"] == pytest.approx(2 / 3)
    assert metrics["gap"] == pytest.approx(0.0)
    assert (metrics["gap_low"], metrics["gap_high"]) == (-1.0, 1.0)  # all resamples of three pairs
    assert metrics["reward_accuracy"] == pytest.approx(1 / 3)
    assert metrics["reward_gap"] == pytest.approx(-0.5)
    for name in ("accuracy", "token_accuracy", "reward_accuracy"):
        assert metrics[f"{name}_low"] < metrics[name] < metrics[f"{name}_high"]

    before = read(tmp_path / "before", inputs["reference.model"], inputs["dataset"])
    given = {"model": inputs["model"], "dataset": inputs["dataset"], "reference": before}
    config = LogprobsConfig.model_validate({"dataset": "d", "max_length": 32, "engine": ENGINE, "reference": "before"})
    whole = logprobs.run(config, given, context_of(tmp_path / "after", given), inline).metrics
    now, then = (logprobs_by_transformers(inputs[name].folder, PAIRS[:16]) for name in ("model", "reference.model"))
    gaps = (now - then)[:, 0] - (now - then)[:, 1]
    assert whole["reward_gap"] == pytest.approx(gaps.mean().item(), abs=1e-4)
    assert whole["reward_accuracy"] == (gaps > 0).sum().item() / 16
    with pytest.raises(StageError, match="reference: no stage has read the tokens of row row0"):
        logprobs.run(config, given | {"reference": read(tmp_path / "v", inputs["model"], inputs["validation.dataset"])},
                     context_of(tmp_path / "other", given), inline)  # fmt: skip


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.endurance("rl-matrix"))])
@pytest.mark.slow("trains twice")
def test_training_is_the_same(inputs: dict[str, Input], tmp_path: Path, lora: dict[str, Any] | None) -> None:
    stored = {
        f"reference.logprobs.{name}": read(tmp_path / name, inputs["reference.model"], inputs[rows])
        for name, rows in (("trained", "dataset"), ("tested", "validation.dataset"))
    }
    logs = []
    for name, reference, more in (
        ("run", {"model": "other"}, {}),
        ("stored", {"logprobs": ["trained", "tested"]}, stored),
    ):
        config = PreferenceConfig.model_validate_json(
            json.dumps({**SETTINGS, "engine": ENGINE.model_dump(), "lora": lora, "reference": reference,
                        "validation": VALIDATION})
        )  # fmt: skip
        given = {**inputs, **more}
        context = context_of(tmp_path / f"{name}-work", given)
        preference.run(config, given, context, inline)
        logs.append(context.logs)
    assert config.frozen_models == {}
    for (step, ours), (other, theirs) in zip(*logs, strict=True):
        assert step == other
        for metric in ours.keys() & {"loss", "validation/loss", "chosen_reward", "reward_gap", "gradient_norm"}:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-3, abs=1e-5)


def test_the_reference_is_not_loaded(inputs: dict[str, Input], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = read(tmp_path / "stored", inputs["model"], inputs["dataset"])
    config = PreferenceConfig.model_validate_json(
        json.dumps({**SETTINGS, "engine": ENGINE.model_dump(), "reference": {"logprobs": ["stored"]}, "max_steps": 1})
    )
    built: list[PreferenceWorker] = []
    build = PreferenceWorker.__init__

    def noted(worker: PreferenceWorker, *args: Any) -> None:
        build(worker, *args)
        built.append(worker)

    monkeypatch.setattr(PreferenceWorker, "__init__", noted)
    given = {"model": inputs["model"], "dataset": inputs["dataset"], "reference.logprobs.stored": stored}
    output = preference.run(config, given, context_of(tmp_path / "work", given), inline)
    assert [worker._reference for worker in built] == [None]
    # Packed in another way than when they were stored: equal but for rounding.
    assert output.metrics["chosen_reward"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("lacking", ["rows", "tokens"])
def test_pairs_that_were_not_read_are_an_error(inputs: dict[str, Input], tmp_path: Path, lacking: str) -> None:
    rows = dataset(tmp_path / "some", PAIRS[:15]) if lacking == "rows" else inputs["dataset"]
    if lacking == "tokens":
        rows = dataset(tmp_path / "cut", PAIRS[:16], on_long_row="truncate")
    stored = read(tmp_path / "stored", inputs["model"], rows, max_length=32 if lacking == "rows" else 12)
    config = PreferenceConfig.model_validate_json(
        json.dumps({**SETTINGS, "engine": ENGINE.model_dump(), "reference": {"logprobs": ["stored"]}})
    )
    given = {"model": inputs["model"], "dataset": inputs["dataset"], "reference.logprobs.stored": stored}
    row = "row15" if lacking == "rows" else "row0"
    with pytest.raises(StageError, match=rf"^reference\.logprobs: no stage has read the tokens of row {row}: give"):
        preference.run(config, given, context_of(tmp_path / "work", given), no_cluster)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": {"logprobs": ["a"], "model": "b"}}, "remove one of them"),
        ({"reference": {"logprobs": ["a"], "offload": True}}, "reference.offload is for a reference that is run here"),
        ({"reference": {"logprobs": ["a"]}, "losses": {"a": {"type": "cpo"}}}, "no loss has a reference: remove it"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PreferenceConfig.model_validate_json(json.dumps({**SETTINGS, "engine": ENGINE.model_dump(), **settings}))
    assert message in str(caught.value)
