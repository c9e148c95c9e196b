"""The preference stage: what it learns, from what it starts, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.encoding import encode_completion, load_tokenizer
from rlhf_core.config.base import result_settings
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.models.merging import merge_adapter
from rlhf_core.stages import preference
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import ENGINE, base_model, context_of, dataset, inline, no_cluster, pairs

pytestmark = pytest.mark.parts

SETTINGS: dict[str, Any] = {
    "dataset": "d", "batch_size": 8, "epochs": 3, "max_length": 32, "log_every": 1, "engine": ENGINE,
    "optimizer": {"learning_rate": 5e-3, "warmup_share": 0.0, "schedule": "constant"},
    "losses": {"dpo": {"type": "dpo", "beta": 0.5}},
}  # fmt: skip
VALIDATION = {"dataset": "v", "every_steps": 3, "metric": "accuracy"}
PAIRS = pairs(48)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    return {
        "model": base_model(folder / "base"), "dataset": dataset(folder / "d", PAIRS[:32]),
        "validation.dataset": dataset(folder / "v", PAIRS[32:]),
    }  # fmt: skip


def run(workdir: Path, inputs: dict[str, Input], **settings: Any) -> tuple[Output, LocalContext]:
    context = context_of(workdir, inputs)
    return preference.run(PreferenceConfig.model_validate({**SETTINGS, **settings}), inputs, context, inline), context


def logprobs(folder: Path, rows: list[dict[str, Any]]) -> Tensor:
    """(rows, 2) of both completions, by transformers in float64, a sequence at a time."""
    tokenizer, found = load_tokenizer(folder), []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for row in rows:
        for side in ("chosen", "rejected"):
            ids, mask = encode_completion(tokenizer, row["prompt"], row[side])
            with torch.no_grad():
                scores = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1], dim=-1)
            found.append(scores.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0][torch.tensor(mask[1:])].sum())
    return torch.stack(found).view(-1, 2)


@pytest.mark.parametrize(
    "lora", [None, pytest.param({"rank": 4, "alpha": 16.0}, marks=pytest.mark.endurance("architectures"))]
)
def test_it_learns_the_preference(inputs: dict[str, Input], tmp_path: Path, lora: dict[str, Any] | None) -> None:
    output, context = run(tmp_path, inputs, lora=lora, validation={**VALIDATION, "keep": "last"})
    assert output.kind == (Kind.POLICY if lora is None else Kind.ADAPTER)
    assert output.metrics["steps"] == 12
    lines = [metrics for _, metrics in context.logs if "loss" in metrics]
    assert lines[0]["loss"] == pytest.approx(-logsigmoid(torch.zeros(())).item(), rel=1e-6)
    assert lines[-1]["loss"] < 0.5

    folder = output.folder
    if lora is not None:
        merge_adapter(inputs["model"].folder, folder, tmp_path / "merged")
        folder = tmp_path / "merged"
    rewards = 0.5 * (logprobs(folder, PAIRS[32:]) - logprobs(inputs["model"].folder, PAIRS[32:]))
    measured = [metrics for _, metrics in context.logs if "validation/loss" in metrics][-1]
    gap = rewards[:, 0] - rewards[:, 1]
    assert measured["validation/accuracy"] == 1.0
    assert measured["validation/loss"] == pytest.approx(-logsigmoid(gap).mean().item(), rel=1e-4)
    assert measured["validation/reward_gap"] == pytest.approx(gap.mean().item(), rel=1e-4)
    assert measured["validation/chosen_reward"] == pytest.approx(rewards[:, 0].mean().item(), rel=1e-3, abs=1e-4)


@pytest.mark.endurance("architectures")
def test_the_reference_may_be_any_model(inputs: dict[str, Input], tmp_path: Path) -> None:
    other = {**inputs, "reference.model": base_model(tmp_path / "other", seed=1)}
    settings = {"reference": {"model": "other", "offload": True}, "max_steps": 1, "batch_size": 32}
    output, _ = run(tmp_path / "run", other, **settings)
    rewards = 0.5 * (
        logprobs(inputs["model"].folder, PAIRS[:32]) - logprobs(other["reference.model"].folder, PAIRS[:32])
    )
    assert output.metrics["chosen_reward"] == pytest.approx(rewards[:, 0].mean().item(), rel=1e-4)
    assert output.metrics["loss"] == pytest.approx(-logsigmoid(rewards[:, 0] - rewards[:, 1]).mean().item(), rel=1e-4)


def test_a_reference_that_cannot_read_the_tokens_is_refused(inputs: dict[str, Input], tmp_path: Path) -> None:
    other = base_model(tmp_path / "other").folder
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    given = {**inputs, "reference.model": local_input(other, Kind.BASE_MODEL)}
    config = PreferenceConfig.model_validate({**SETTINGS, "reference": {"model": "other"}})
    with pytest.raises(StageError, match=r"^reference\.model: its tokenizer differs from the policy's: name another"):
        preference.run(config, given, context_of(tmp_path / "run", given), no_cluster)


@pytest.mark.endurance("architectures")
@pytest.mark.parametrize(("zero_stage", "lora"), [(1, None), (3, {"rank": 4})])
def test_sharding_changes_nothing(
    inputs: dict[str, Input], tmp_path: Path, zero_stage: int, lora: dict[str, Any] | None
) -> None:
    engine = ENGINE.model_copy(update={"zero_stage": zero_stage})
    whole, context = run(tmp_path / "0", inputs, lora=lora, max_steps=3)
    sharded, other = run(tmp_path / "1", inputs, lora=lora, max_steps=3, engine=engine)
    for ours, theirs in zip(context.logs, other.logs, strict=True):
        assert ours[1]["loss"] == pytest.approx(theirs[1]["loss"], rel=1e-5)
        assert ours[1]["gradient_norm"] == pytest.approx(theirs[1]["gradient_norm"], rel=1e-4)
    assert whole.metrics["steps"] == sharded.metrics["steps"] == 3


def test_rebel_learns_how_much_better_each_completion_is(inputs: dict[str, Input], tmp_path: Path) -> None:
    """The gap of the policy's rewards becomes the margin; a row without one is refused."""
    rebel: dict[str, Any] = {"losses": {"rebel": {"type": "rebel", "beta": 0.5}}, "max_steps": 15, "epochs": 15}
    apart = {**inputs, "dataset": dataset(tmp_path / "apart", [{**pair, "margin": 2.0} for pair in pairs(8)])}
    _, context = run(tmp_path / "trained", apart, **rebel)
    first, last = context.logs[0][1], context.logs[-1][1]
    assert first["loss"] == pytest.approx(4.0, rel=1e-5)
    assert last["reward_gap"] == pytest.approx(2.0, abs=0.3)
    assert last["loss"] < 0.2
    with pytest.raises(StageError, match=r"losses\.rebel reads how much better .* has no `margin`: add the column"):
        run(tmp_path / "refused", inputs, **rebel)


def test_a_loss_without_a_reference_loads_none(inputs: dict[str, Input], tmp_path: Path) -> None:
    config = PreferenceConfig.model_validate({**SETTINGS, "losses": {"simpo": {"type": "simpo"}}})
    assert not config.frozen_models
    assert "reference" not in result_settings(config)
    output, _ = run(tmp_path, inputs, losses={"simpo": {"type": "simpo"}}, max_steps=2)
    assert output.metrics["loss"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"losses": {}}, "at least 1 item"),
        ({"losses": {"a": {"type": "orpo"}}, "reference": {"model": "sft"}}, "no loss has a reference: remove it"),
        ({"lora": {"rank": 4}, "reference": {"offload": True}}, "the policy's base with its adapter off"),
        (
            {"reference": {"engine": {"dtype": "bfloat16"}}},
            "reference.engine.dtype is bfloat16, but the policy's is float",
        ),
        ({"lora": {"rank": 4, "dropout": 0.1}}, "`dropout` is false, which switches all dropout off"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PreferenceConfig.model_validate({**SETTINGS, **settings})
    assert message in str(caught.value)
