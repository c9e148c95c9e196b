"""The stages that train rewards at tokens of their own: what they learn, refuse and leave for RL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_completion, load_tokenizer
from rlhf_core.config.rewards.rewards import ProcessRewardModelReward
from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig, RewardRegressionConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.rewards.model import RewardReader
from rlhf_core.stages import process_reward_model, reward_regression
from rlhf_core.types import PackedBatch, Prompt, Trajectory
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    base_model,
    context_of,
    dataset,
    inline,
    no_cluster,
    stored_config,
)

pytestmark = pytest.mark.endurance("architectures")

SETTINGS: dict[str, Any] = {
    "dataset": "d", "batch_size": 8, "epochs": 4, "max_length": 48, "log_every": 1, "engine": ENGINE,
    "optimizer": {"learning_rate": 5e-3, "warmup_share": 0.0, "schedule": "constant"},
}  # fmt: skip
HELD_OUT = {"dataset": "v", "every_steps": 4, "metric": "accuracy"}
CONFIG = ProcessRewardModelConfig.model_validate({**SETTINGS, "validation": HELD_OUT, "separator": "; "})
Inputs = dict[str, Input]


def stepwise(count: int) -> list[dict[str, Any]]:
    """Steps with a `z` are wrong."""
    rows = []
    for index in range(count):
        steps = [letter * (1 + index % 3) for letter in ("ab", "az", "zb", "ba")[index % 4 :]] + ["bz"[index % 2]]
        asked = [{"role": "user", "content": f"say {index}"}]
        rows.append({"prompt": asked, "steps": steps, "labels": [float("z" not in step) for step in steps]})
    return rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    rows = stepwise(64)
    return {
        "model": base_model(folder / "base"), "dataset": dataset(folder / "d", rows[:48]),
        "validation.dataset": dataset(folder / "v", rows[48:]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Output:
    folder = tmp_path_factory.mktemp("run")
    return process_reward_model.run(CONFIG, inputs, context_of(folder, inputs), inline)


def read_at_steps(folder: Path, normalize: bool) -> Tensor:
    """The rewards of all steps of the held-out rows, as RL reads them."""
    settings = ProcessRewardModelReward(type="process_reward_model", normalize=normalize, separator="; ")
    tokenizer = load_tokenizer(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)

    @torch.no_grad()
    def scores(batch: PackedBatch) -> Tensor:
        parts = batch.input_ids.split(batch.sequence_lengths.tolist())
        return torch.cat([model.score(model.model(ids[None]).last_hidden_state)[0, :, 0] for ids in parts])

    trajectories = []
    for row in stepwise(64)[48:]:
        ids, mask = map(torch.tensor, encode_completion(tokenizer, row["prompt"], "; ".join(row["steps"])))
        trajectories.append(Trajectory(Prompt("p", "", (), {}), ids, mask, torch.zeros(len(ids)), 0, "stop"))
    result = RewardReader.of(settings, folder, folder, 48).reward(scores)(trajectories)
    assert result.steps is not None
    return torch.tensor([reward for steps in result.steps for reward in steps], dtype=torch.float64)


def test_it_learns_which_steps_are_right_and_rl_reads_them_where_they_were_trained(trained: Output) -> None:
    assert trained.kind == Kind.REWARD_MODEL
    labels = torch.tensor([label for row in stepwise(64)[48:] for label in row["labels"]])
    assert trained.metrics["held_out_steps"] == len(labels)
    assert trained.metrics["held_out_positive_share"] == pytest.approx(labels.mean().item())
    assert trained.metrics["held_out_accuracy"] == trained.metrics["validation_best"] == 1.0
    raw = read_at_steps(trained.folder, normalize=False)
    assert ((raw > 0) == (labels > 0.5)).all()
    stored = stored_config(trained.folder)
    assert stored["step_separator"] == "; "
    assert stored["reward_mean"] == trained.metrics["reward_mean"] == pytest.approx(raw.mean().item(), abs=1e-5)
    assert stored["reward_std"] == pytest.approx(raw.std(correction=0).item(), rel=1e-5)
    normalised = read_at_steps(trained.folder, normalize=True)
    torch.testing.assert_close(normalised, (raw - raw.mean()) / raw.std(correction=0), rtol=1e-4, atol=1e-4)


def test_another_separator_than_it_was_trained_with_is_refused(trained: Output) -> None:
    settings = ProcessRewardModelReward(type="process_reward_model")
    with pytest.raises(StageError, match=r"trained on steps that end with '; ', and is to be read where '\\n' ends"):
        RewardReader.of(settings, trained.folder, trained.folder, 32)


@pytest.mark.parametrize(
    ("on_bad_row", "rows", "message"),
    [
        ("error", [{"steps": ["a", "b; c"], "labels": [1.0, 0.0]}], r"row row0: steps\[1\] holds the separator '; '"),
        ("drop", [{"steps": ["a; b"], "labels": [1.0]}, {"steps": ["a", "b"], "labels": [1.0, 1.0]}],
         "of the dataset every step has the label 1, so there is nothing to tell apart"),
        ("error", [{"steps": ["a"], "labels": [0.5]}] * 3, "every step has the label 0.5, so there is nothing"),
    ],
)  # fmt: skip
def test_what_teaches_nothing_is_refused_before_anything_starts(
    inputs: Inputs, tmp_path: Path, on_bad_row: str, rows: list[dict[str, Any]], message: str
) -> None:
    asked = [{"prompt": [{"role": "user", "content": f"q{index}"}], **row} for index, row in enumerate(rows)]
    given = {**inputs, "dataset": dataset(tmp_path / "d", asked, on_bad_row=on_bad_row)}
    with pytest.raises(StageError, match=message):
        process_reward_model.run(CONFIG, given, context_of(tmp_path / "run", given), no_cluster)


def test_one_step_is_not_enough_to_judge_the_model_by(inputs: Inputs, tmp_path: Path) -> None:
    one = {"prompt": [{"role": "user", "content": "q"}], "steps": ["a"], "labels": [1.0]}
    given = {**inputs, "validation.dataset": dataset(tmp_path / "v", [one])}
    message = "only one of the steps is held out, but a standard deviation needs two"
    with pytest.raises(StageError, match=message):
        process_reward_model.run(CONFIG, given, context_of(tmp_path / "run", given), no_cluster)


def rewarded(count: int) -> list[dict[str, Any]]:
    """1.5 where a completion ends with `a`, else -0.5."""
    rows = []
    for index in range(count):
        texts = ["xy"[index % 2] + "a", "xyz"[index % 3] + "b"]
        completions = [{"text": text, "reward": 1.5 if text.endswith("a") else -0.5} for text in texts]
        rows.append({"prompt": [{"role": "user", "content": f"say {index}"}], "completions": completions})
    return rows


def test_rewards_are_predicted_for_completions_of_prompts_that_are_held_out(inputs: Inputs, tmp_path: Path) -> None:
    given = {"model": inputs["model"], "dataset": dataset(tmp_path / "d", rewarded(60))}
    config = RewardRegressionConfig.model_validate({**SETTINGS, "batch_size": 16})
    output = reward_regression.run(config, given, context_of(tmp_path / "run", given), inline)
    assert output.metrics["held_out_completions"] == 6  # of 3 rows
    assert output.metrics["held_out_loss"] < 0.1  # type: ignore[operator]  # 1 by the mean alone
    assert stored_config(output.folder)["reward_mean"] == output.metrics["reward_mean"] == pytest.approx(0.5, abs=0.2)
    assert output.metrics["reward_std"] == pytest.approx(1.0, abs=0.2)
    assert output.metrics["steps"] == 4 * 8  # 114 completions in 8 batches


def test_a_completion_without_a_reward_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    rows = rewarded(3)
    del rows[1]["completions"][0]["reward"]
    given = {**inputs, "dataset": dataset(tmp_path / "d", rows)}
    with pytest.raises(StageError, match="row row1: a completion has no `reward` to learn"):
        reward_regression.run(
            RewardRegressionConfig.model_validate(SETTINGS), given, context_of(tmp_path / "run", given), no_cluster
        )
