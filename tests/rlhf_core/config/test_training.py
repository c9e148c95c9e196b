"""Validation of optimizers and engines in a recipe, and their part in a stage key."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.base import result_settings
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.inputs import input_settings
from rlhf_core.config.stages.distillation import DistillationConfig
from rlhf_core.config.stages.language_models import PretrainConfig, SFTConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.config.stages.trained import LoraConfig, OptimizerConfig, SupervisedConfig

MUON = {"name": "muon", "learning_rate": 1e-3}


def sft(optimizer: dict[str, Any], engine: dict[str, Any]) -> SFTConfig:
    return SFTConfig.model_validate(
        {"dataset": "d", "batch_size": 1, "max_length": 8, "optimizer": optimizer, "engine": engine}
    )


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (
            {"dtype": "float32", "zero_stage": 0, "offload_optimizer": True},
            "offload_optimizer needs zero_stage 1, 2 or 3",
        ),
        ({"zero_stage": 2, "offload_parameters": True}, "offload_parameters needs zero_stage 3"),
        (
            {"zero_stage": 3, "gradient_checkpointing": "selective"},
            "cannot be done where zero_stage 3 shards",
        ),
        ({"compiled": True, "gradient_checkpointing": "selective"}, "selective is not for compiled layers"),
        ({"sequence_parallel": 2, "compiled": True}, "compiled layers were not tested with tokens that workers share"),
        (
            {"sequence_parallel": 2, "attention": "eager"},
            "exchanges tokens in the attention sdpa, but attention is eager",
        ),
        ({"tensor_parallel": 2, "zero_stage": 3}, "tensor_parallel divides the weights that zero_stage 3 would divide"),
        ({"tensor_parallel": 2, "compiled": True}, "compiled layers were not tested with weights that workers share"),
        ({"tensor_parallel": 2, "attention": "flash_attention_2"}, "does not run in main memory, where"),
        ({"attention": "flex", "compiled": True}, "flex was not tested in compiled layers; remove `compiled`"),
        ({"attention": "flex", "tensor_parallel": 2}, "flex was not tested with weights that workers share"),
        (
            {"attention": "flex", "sequence_parallel": 2},
            "exchanges tokens in the attention sdpa, but attention is flex",
        ),
        (
            {"attention": "flex", "gradient_checkpointing": "selective"},
            "flex was not tested with gradient_checkpointing",
        ),
        ({"tensor_parallel": 2, "gradient_checkpointing": "selective"}, "selective keeps sums of workers that share"),
    ],
)
def test_what_cannot_be_together_is_refused(engine: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        EngineConfig.model_validate(engine)


@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        ({"dtype": "float32", "zero_stage": 0}, 0), ({"dtype": "float32", "zero_stage": 1}, 1),
        ({"zero_stage": 0, "offload_optimizer": True}, 2), ({"zero_stage": 1}, 2), ({"zero_stage": 3}, 3),
    ],
)  # fmt: skip
def test_bfloat16_is_sharded_at_least_as_stage_2(engine: dict[str, Any], stage: int) -> None:
    assert EngineConfig.model_validate(engine).sharding == stage


def test_a_run_may_resume_with_its_tensors_and_tokens_divided_otherwise() -> None:
    """Its key is that of stage 2, as when the stage was part of it."""
    keyed = result_settings(EngineConfig())
    assert keyed["zero_stage"] == 2
    assert result_settings(EngineConfig(zero_stage=3, sequence_parallel=4)) == keyed
    assert result_settings(EngineConfig(tensor_parallel=4)) == keyed
    assert result_settings(EngineConfig(dtype="float32")) != keyed


@pytest.mark.parametrize(
    ("engine", "gpus", "tokens"),
    [
        ({}, 0.0, 2048),
        ({}, 1.0, 16384),
        ({"tokens_per_micro_batch": 7, "sequence_parallel": 4}, 1.0, 7),
        ({"sequence_parallel": 4}, 1.0, 4 * 16384),
    ],
)
def test_a_forward_has_fewer_tokens_on_cpus(engine: dict[str, Any], gpus: float, tokens: int) -> None:
    placement = Placement(gpus_per_worker=gpus)
    assert EngineConfig.model_validate(engine).micro_batch_tokens(placement) == tokens


def test_muon_in_main_memory_is_refused() -> None:
    assert sft(MUON, {"zero_stage": 3}).optimizer.name == "muon"
    with pytest.raises(ValidationError, match=r"optimizer\.name muon does not work with engine\.offload_optimizer"):
        sft(MUON, {"offload_optimizer": True})


@pytest.mark.parametrize("config", [SFTConfig, RewardModelConfig])
def test_the_dropout_of_an_adapter_without_dropout_is_refused(config: type[SupervisedConfig]) -> None:
    settings = {"dataset": "d", "batch_size": 1, "max_length": 8, "optimizer": {"learning_rate": 1.0}}
    adapter = {"rank": 2, "dropout": 0.1}
    assert config.model_validate({**settings, "lora": adapter}).dropout
    with pytest.raises(ValidationError, match=r"lora\.dropout is 0\.1, but `dropout` is false"):
        config.model_validate({**settings, "lora": adapter, "dropout": False})


@pytest.mark.parametrize("kind", [{"dora": True}, {"modules_to_save": ["norm"]}], ids=str)
def test_adapters_that_read_sharded_weights_are_refused(kind: dict[str, Any]) -> None:
    settings = {"dataset": "d", "batch_size": 1, "max_length": 8, "optimizer": {"learning_rate": 1.0}}
    text = json.dumps({**settings, "lora": {"rank": 2, **kind}, "engine": {"zero_stage": 3}})
    with pytest.raises(ValidationError, match=rf"lora\.{next(iter(kind))} reads weights of the model beside their own"):
        SFTConfig.model_validate_json(text)


@pytest.mark.parametrize(
    ("engine", "says"),
    [({"zero_stage": 3}, r"packs two weights into a byte, .* zero_stage 3 would cut; set engine\.zero_stage 2"),
     ({"compiled": True}, "lora.quantised was not tested with engine.compiled; remove one of them")],
)  # fmt: skip
def test_engines_that_cannot_have_a_quantised_base(engine: dict[str, Any], says: str) -> None:
    settings = {"dataset": "d", "batch_size": 1, "max_length": 8, "optimizer": {"learning_rate": 1.0}}
    with pytest.raises(ValidationError, match=says):
        SFTConfig.model_validate({**settings, "lora": {"rank": 2, "quantised": "nf4"}, "engine": engine})


def test_later_settings_of_adapters_keep_earlier_keys() -> None:
    assert result_settings(LoraConfig(rank=2)).keys() == {"rank", "alpha", "dropout", "target_modules"}
    settings = {"dataset": "d", "batch_size": 1, "max_length": 8, "optimizer": {"learning_rate": 1.0}}
    assert "lora" not in result_settings(PretrainConfig.model_validate(settings))
    assert "lora" in result_settings(SFTConfig.model_validate(settings))


def test_settings_of_an_optimizer_that_is_not_used_are_refused() -> None:
    with pytest.raises(ValidationError, match="there is a block `muon`, but the optimizer is adamw; set `name: muon`"):
        OptimizerConfig.model_validate({"learning_rate": 1.0, "muon": {"ns_steps": 3}})


def test_a_final_rate_that_is_never_reached_is_refused() -> None:
    constant = {"learning_rate": 1e-3, "schedule": "constant"}
    again = OptimizerConfig.model_validate(constant)
    assert OptimizerConfig.model_validate(again.model_dump()) == again
    with pytest.raises(ValidationError, match="final_learning_rate_share is 0, but the schedule is constant"):
        OptimizerConfig.model_validate({**constant, "final_learning_rate_share": 0.0})


def test_muons_settings_are_part_of_its_keys_alone() -> None:
    adamw = result_settings(OptimizerConfig(learning_rate=1.0))
    assert "muon" not in adamw
    assert "max_skipped_updates" not in adamw
    muon = OptimizerConfig.model_validate({"name": "muon", "learning_rate": 1.0, "muon": {"ns_steps": 3}})
    assert result_settings(muon)["muon"]["ns_steps"] == 3


@pytest.mark.parametrize(
    "settings", [{"momentum": 1.0}, {"momentum": -0.1}, {"ns_steps": 0}, {"scale": "rms"}], ids=str
)
def test_muons_settings_have_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OptimizerConfig.model_validate({"name": "muon", "learning_rate": 1.0, "muon": settings})


TRAINED = {"dataset": "d", "batch_size": 1, "max_length": 8, "optimizer": {"learning_rate": 1e-3}}
HELD_OUT = {"dataset": "v", "every_steps": 2}


@pytest.mark.parametrize(
    ("validation", "says"),
    [
        ({"metric": "accuracy"}, "validation.metric is `accuracy`; these settings measure loss$"),
        ({"metric": "far/loss"}, "validation.metric is `far/loss`; these settings measure loss$"),
        ({"also": {"far": {"dataset": "f"}}, "metric": "near/loss"}, "these settings measure loss, far/loss$"),
        ({"also": {"a.b": {"dataset": "f"}}}, "validation.also: `a.b` is not a name of letters"),
        ({"also": {"far": {"dataset": "f", "every_steps": 1}}}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_validated(validation: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as raised:
        SFTConfig.model_validate({**TRAINED, "validation": {**HELD_OUT, **validation}})
    assert re.search(says, raised.value.errors()[0]["msg"])


@pytest.mark.parametrize(("metric", "maximise"), [("loss", False), ("far/loss", False), ("far/accuracy", True)])
def test_a_reward_model_may_be_the_most_accurate(metric: str, maximise: bool) -> None:
    validation = {**HELD_OUT, "metric": metric, "also": {"far": {"dataset": "f"}}}
    config = RewardModelConfig.model_validate({**TRAINED, "validation": validation})
    assert config.validation is not None
    assert config.validation.maximise is maximise


@pytest.mark.parametrize(
    ("stage", "data_format"),
    [(PretrainConfig, "text"), (SFTConfig, "conversations"), (RewardModelConfig, "preferences")],
)
def test_held_out_rows_have_the_format_of_the_trained_ones(stage: type[SupervisedConfig], data_format: str) -> None:
    validation = {**HELD_OUT, "also": {"far": {"dataset": "f"}}}
    config = stage.model_validate({**TRAINED, "validation": validation})
    found = {r.path: (r.names, r.reads.format, r.reads.held_out) for r in input_settings(config) if r.path != "model"}
    assert found == {
        "dataset": (("d",), data_format, False),
        "validation.dataset": (("v",), data_format, True),
        "validation.also.far.dataset": (("f",), data_format, True),
    }


def test_a_stage_without_validation_keeps_its_key() -> None:
    plain, validated = (SFTConfig.model_validate({**TRAINED, **more}) for more in ({}, {"validation": HELD_OUT}))
    assert "validation" not in result_settings(plain)
    assert result_settings(validated)["validation"] == {"every_steps": 2, "metric": "loss", "keep": "best"}


SHARED = {
    "dataset": "d", "batch_size": 2, "max_length": 8, "optimizer": {"learning_rate": 1e-3},
    "engine": {"sequence_parallel": 2}, "placement": {"workers": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "settings", "problem"),
    [
        (SFTConfig, {"placement": {"workers": 3}}, "placement.workers=3 is not a multiple of"),
        (SFTConfig, {"batch_size": 1}, "batch_size is 1, fewer than placement.workers=4 / engine.sequence_parallel=2"),
        (PreferenceConfig, {"reference": {"engine": {}}}, "reference.engine.sequence_parallel is 1, but the policy's"),
        (
            DistillationConfig, {"teacher": {"model": "t", "engine": {}}},
            "engine.sequence_parallel is 2, but 1 in the engine of the teacher, on the same workers",
        ),
        (
            SFTConfig, {"engine": {"sequence_parallel": 2, "tensor_parallel": 4}},
            "placement.workers=4 is not a multiple of engine.tensor_parallel=4 x sequence_parallel=2",
        ),
        (
            SFTConfig, {"engine": {"tensor_parallel": 2}, "batch_size": 1},
            "batch_size is 1, fewer than placement.workers=4 / engine.tensor_parallel=2",
        ),
        (
            PreferenceConfig, {"engine": {"tensor_parallel": 2}, "reference": {"engine": {}}},
            "reference.engine.tensor_parallel is 1, but the policy's is 2",
        ),
        (
            DistillationConfig, {"engine": {"tensor_parallel": 2}, "teacher": {"model": "t", "engine": {}}},
            "engine.tensor_parallel is 2, but 1 in the engine of the teacher, on the same workers",
        ),
        (
            SFTConfig, {"engine": {"tensor_parallel": 2}, "lora": {"rank": 2}},
            "lora: adapters were not tested on weights that workers share .engine.tensor_parallel.",
        ),
        (
            SFTConfig, {"engine": {"tensor_parallel": 2}, "optimizer": {"learning_rate": 1e-3, "name": "muon"}},
            "optimizer.name muon needs whole matrices, which the workers of engine.tensor_parallel share; use adamw",
        ),
    ],
)  # fmt: skip
def test_workers_that_share_tokens_or_weights_are_divided_alike(
    config: type[SupervisedConfig], settings: dict[str, Any], problem: str
) -> None:
    more = {"losses": {"dpo": {"type": "dpo"}}} if config is PreferenceConfig else {}
    with pytest.raises(ValidationError, match=problem):
        config.model_validate({**SHARED, **more, **settings})
