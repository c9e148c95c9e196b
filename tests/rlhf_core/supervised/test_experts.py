"""Mixture-of-experts models are balanced in SFT and in RL, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from rlhf_core.algorithms import build_algorithm
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError
from rlhf_core.models.loading import load_scalar_model
from rlhf_core.packing import pack
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.stages import reward_model, sft
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.pairs import pack_pairs
from rlhf_core.supervised.scalar import RewardModel
from rlhf_core.training.group import InlineGroup
from rlhf_core.types import TrainingBatch
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    OPTIMIZER,
    base_model,
    context_of,
    conversations,
    dataset,
    inline,
    pairs,
)

pytestmark = pytest.mark.endurance("architectures")


def experts(folder: Path) -> Input:
    """The small base model's tokenizer with a Mixtral of two layers and four experts."""
    dense = base_model(folder)
    torch.manual_seed(0)
    MixtralForCausalLM(
        MixtralConfig(
            vocab_size=len(word_level_tokenizer((), 64)), hidden_size=32, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, max_position_embeddings=64,
            initializer_range=0.3,
        )
    ).save_pretrained(dense.folder)  # fmt: skip
    return dense


def sft_config(**settings: Any) -> SFTConfig:
    return SFTConfig(
        dataset="d",
        epochs=2,
        batch_size=12,
        max_length=32,
        optimizer=OPTIMIZER,
        log_every=1,
        **{"engine": ENGINE, **settings},
    )


def train_three_ways(
    folder: Path, run: Callable[..., Output], config: Callable[..., Any], inputs: dict[str, Input]
) -> tuple[dict[str, list[Any]], dict[str, dict[str, torch.Tensor]]]:
    """Without balancing, with it, and with it in small micro-batches: each line's balancing loss, and the weights."""
    losses, weights = {}, {}
    for name, settings in {
        "off": {},
        "on": {"moe_coefficient": 1.0},
        "on, small": {"moe_coefficient": 1.0, "engine": ENGINE.model_copy(update={"tokens_per_micro_batch": 16})},
    }.items():
        context = context_of(folder / name, inputs)
        trained = run(config(**settings), inputs, context, inline).folder
        weights[name] = load_file(trained / "model.safetensors")
        losses[name] = [metrics.get("load_balancing_loss") for _, metrics in context.logs]
    return losses, weights


def test_sft_balances_the_experts_however_a_step_is_split(tmp_path: Path) -> None:
    inputs = {"model": experts(tmp_path / "base"), "dataset": dataset(tmp_path / "data", conversations(12))}
    losses, weights = train_three_ways(tmp_path, sft.run, sft_config, inputs)
    assert losses["off"] == [None] * 2
    assert losses["on"] == pytest.approx(losses["on, small"], rel=1e-4)
    router = next(name for name in weights["on"] if name.endswith("gate.weight"))
    assert (weights["on"][router] - weights["off"][router]).abs().max() > 1e-3
    for tensor, same in zip(weights["on"].values(), weights["on, small"].values(), strict=True):
        torch.testing.assert_close(tensor, same, rtol=0, atol=1e-4)


def reward_config(**settings: Any) -> RewardModelConfig:
    common = {"dataset": "d", "batch_size": 8, "max_length": 32, "optimizer": OPTIMIZER, "log_every": 1}
    return RewardModelConfig(**{"engine": ENGINE, **common, **settings})


def test_a_reward_model_balances_the_experts_however_a_step_is_split(tmp_path: Path) -> None:
    inputs = {"model": experts(tmp_path / "base"), "dataset": dataset(tmp_path / "data", pairs(19))}
    logged, weights = train_three_ways(tmp_path, reward_model.run, reward_config, inputs)
    losses = {name: [loss for loss in found if loss is not None] for name, found in logged.items()}
    assert losses["off"] == []
    assert len(losses["on"]) == 3
    assert all(loss > 2.0 for loss in losses["on"])  # 2: evenly, two a token
    assert losses["on"] == pytest.approx(losses["on, small"], rel=1e-4)
    router = next(name for name in weights["on"] if name.endswith("gate.weight"))
    assert (weights["on"][router] - weights["off"][router]).abs().max() > 1e-3
    for tensor, same in zip(weights["on"].values(), weights["on, small"].values(), strict=True):
        torch.testing.assert_close(tensor, same, rtol=0, atol=1e-4)


def test_the_experts_of_both_completions_count_and_those_of_a_filler_do_not(tmp_path: Path) -> None:
    model = load_scalar_model(experts(tmp_path).folder, dtype=torch.float32, attention="sdpa")
    rewards = RewardModel(model, language=False)
    one = Example("a", ([5, 6, 7], [5, 8, 9, 6]), ([False, True, True], [False] * 4))
    other = Example("b", ([7, 7], [9, 6]), ([False] * 2, [False] * 2))
    with_filler = rewards(pack_pairs([one, other]), with_routing=True)[2].detach()
    torch.testing.assert_close(with_filler, rewards(pack_pairs([one]), with_routing=True)[2].detach())
    layers, per_token = 2, 2
    assert float(with_filler[0].sum()) == 7 * layers * per_token
    assert rewards(pack_pairs([one]))[2] is None


def test_a_reward_model_of_a_dense_model_with_a_coefficient_is_refused(tmp_path: Path) -> None:
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "data", pairs(6))}
    says = "moe_coefficient is set, but LlamaForSequenceClassification has no experts to balance"
    with pytest.raises(StageError, match=says):
        reward_model.run(reward_config(moe_coefficient=0.1), inputs, context_of(tmp_path / "run", inputs), inline)


def test_sft_of_a_dense_model_with_a_coefficient_is_refused(tmp_path: Path) -> None:
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "data", conversations(6))}
    with pytest.raises(StageError, match="moe_coefficient is set, but LlamaForCausalLM has no experts to balance"):
        sft.run(sft_config(moe_coefficient=0.1), inputs, context_of(tmp_path / "run", inputs), inline)


def rl_trainer(model: Input, folder: Path, moe_coefficient: float) -> PolicyTrainer:
    config = RLConfig.model_validate({
        "algorithm": "grpo", "dataset": "p", "steps": 4, "prompts_per_step": 2, "sampling": {"max_tokens": 4},
        "rollout": {"max_length": 8}, "engine": {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 8},
        "grpo": {
            "rewards": {"exact": {"type": "verifier"}}, "group_size": 2, "moe_coefficient": moe_coefficient,
            "optimizer": {"learning_rate": 5e-3, "schedule": "constant", "warmup_share": 0.0},
        },
    })  # fmt: skip
    group = InlineGroup(RLWorker, config, context_of(folder, {"model": model}), roles(config, {"model": model}))
    return PolicyTrainer(config, build_algorithm(config), group, seed=0)


def test_rl_balances_the_experts(tmp_path: Path) -> None:
    model = experts(tmp_path / "base")
    batch = pack(
        [[5, 6, 7, 8], [9, 5, 11, 12, 6], [7, 14, 15], [4, 5, 6, 9]], [[False, *[True] * n] for n in (3, 4, 2, 3)]
    )
    batch = TrainingBatch(
        **vars(batch), rollout_logprobs=torch.zeros(batch.num_tokens), advantages=torch.zeros(batch.num_tokens)
    )
    trainer = rl_trainer(model, tmp_path / "on", 1.0)
    losses = [trainer.update(batch, step).metrics["load_balancing_loss"] for step in range(4)]
    assert 2.0 < losses[-1] < losses[0]  # 2: evenly, two a token
    metrics = rl_trainer(model, tmp_path / "off", 0.0).update(batch, 0).metrics
    assert "load_balancing_loss" not in metrics
    assert metrics["gradient_norm"] == 0  # without advantages nothing else is trained


def test_rl_publishes_each_expert_under_its_name_on_disk(tmp_path: Path) -> None:
    model = experts(tmp_path / "base")
    stored = load_file(model.folder / "model.safetensors")
    with rl_trainer(model, tmp_path / "run", 0.0).publication(1) as weights:
        assert weights.manifest.digests == {name: tensor_digest(tensor) for name, tensor in stored.items()}
        published = dict(weights.transport.receive(weights.manifest))
    assert all(torch.equal(published[name], tensor) for name, tensor in stored.items())
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in published


def test_rl_of_a_dense_model_with_a_coefficient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="moe_coefficient is set, but LlamaForCausalLM has no experts to balance"):
        rl_trainer(base_model(tmp_path / "base"), tmp_path / "run", 0.1)
