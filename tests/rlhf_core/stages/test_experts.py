"""A mixture-of-experts model through SFT, a reward model, RL with each publish proven, merge and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.evaluation import EvaluationConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.merging import MergeConfig
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.contract import Input, Output
from rlhf_core.stages import evaluation, merge, reward_model, rl, sft
from rlhf_core.stages.in_process import InProcessCluster
from tests.rlhf_core.stages.context import LocalContext, local_input
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

PROMPTS = [{"prompt": [{"role": "user", "content": f"say {word}"}], "answer": word} for word in "abcd"]
ROLLOUT = {"max_length": 32, "cpu_cache_gib": 0.05, "cpus_per_engine": 0.5}
TRAINED: dict[str, Any] = {
    "dataset": "d", "batch_size": 8, "max_length": 32, "optimizer": OPTIMIZER, "engine": ENGINE, "log_every": 1,
}  # fmt: skip
GRPO = {
    "algorithm": "grpo", "dataset": "prompts", "steps": 3, "prompts_per_step": 4, "sampling": {"max_tokens": 4},
    "rollout": ROLLOUT, "engine": {"dtype": "float32", "zero_stage": 2},
    "grpo": {
        "rewards": {"taste": {"type": "reward_model"}, "exact": {"type": "verifier"}}, "group_size": 4,
        "moe_coefficient": 0.01, "optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup_share": 0.0},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    """`model`, after SFT, and `reward_model`: of four experts, two a token."""
    folder = tmp_path_factory.mktemp("models")
    base = base_model(folder / "base")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(word_level_tokenizer((), 64)), hidden_size=64, moe_intermediate_size=32, head_dim=32,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
            max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=True,
        )
    ).save_pretrained(base.folder)  # fmt: skip
    inputs = {"model": base, "dataset": dataset(folder / "conversations", conversations(16))}
    tuned = sft.run(
        SFTConfig(moe_coefficient=0.01, **TRAINED), inputs, context_of(folder / "sft", inputs), inline
    ).folder
    model = local_input(tuned, Kind.POLICY)
    inputs = {"model": model, "dataset": dataset(folder / "pairs", pairs(24))}
    config = RewardModelConfig(moe_coefficient=0.01, **TRAINED)
    judged = reward_model.run(config, inputs, context_of(folder / "reward", inputs), inline)
    return {"model": model, "reward_model": local_input(judged.folder, Kind.REWARD_MODEL)}


def run_rl(
    models: dict[str, Input], folder: Path, cluster: InProcessCluster, **settings: Any
) -> tuple[Output, LocalContext]:
    inputs = {
        "model": models["model"], "grpo.rewards.taste.model": models["reward_model"],
        "dataset": dataset(folder / "prompts", PROMPTS),
    }  # fmt: skip
    context = context_of(folder / "work", inputs)

    config = RLConfig.model_validate({**GRPO, **settings})
    return rl.run(config, inputs, context, cluster), context


def assert_proven(context: LocalContext) -> None:
    """By every tensor, experts among them, in every step."""
    assert len(context.logs) == 3
    for _, metrics in context.logs:
        assert metrics["weight_difference"] < 1e-5
        assert metrics["rollout_mismatch"] < 1e-5
        assert metrics["load_balancing_loss"] > 0
        assert "tensors_not_read_back" not in metrics


@pytest.mark.endurance("architectures")
@pytest.mark.slow("RL with vLLM")
def test_grpo_of_all_weights(models: dict[str, Input], in_process: InProcessCluster, tmp_path: Path) -> None:
    output, context = run_rl(models, tmp_path, in_process)
    assert_proven(context)
    before, after = (load_file(f / "model.safetensors") for f in (models["model"].folder, output.folder))
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    experts = {name for name in before if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    assert experts <= set(moved)


@pytest.mark.endurance("architectures")
@pytest.mark.slow("RL with vLLM")
def test_grpo_of_an_adapter_its_merge_and_an_evaluation(
    models: dict[str, Input], in_process: InProcessCluster, tmp_path: Path
) -> None:
    output, context = run_rl(models, tmp_path, in_process, lora={"rank": 4})
    assert_proven(context)
    factors = load_file(output.folder / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in factors} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(float(factor.abs().max()) > 0 for factor in factors.values())

    inputs = {"model": models["model"], "adapter": local_input(output.folder, Kind.ADAPTER)}
    merged = merge.run(MergeConfig(adapter="rl"), inputs, context_of(tmp_path / "merge", inputs)).folder
    before, after = (load_file(f / "model.safetensors") for f in (models["model"].folder, merged))
    moved = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj"}

    inputs = {"model": local_input(merged, Kind.POLICY), "dataset": dataset(tmp_path / "held_out", PROMPTS)}
    config = EvaluationConfig.model_validate({
        "dataset": "held_out", "scorers": {"exact": {"type": "verifier"}}, "samples": 2, "pass_at": (1, 2),
        "sampling": {"max_tokens": 4, "top_p": 0.9, "top_k": 8, "min_p": 0.01}, "rollout": ROLLOUT,
    })  # fmt: skip
    metrics = evaluation.run(config, inputs, context_of(tmp_path / "evaluation", inputs), in_process).metrics
    assert 0 <= metrics["pass@1"] <= metrics["pass@2"] <= 1
