"""The RL stage on real parts, as Ray actors and without Ray: a DeepSpeed rank, vLLM, each publish proven."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.contract import Input, Output
from rlhf_core.errors import RewardError, StageError
from rlhf_core.models.folders.folder import copy_tokenizer
from rlhf_core.stages import base, rl
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.stages.ray_cluster import RayCluster
from rlhf_core.testing.stage import without_times
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.stages.supervised_runs import context_of, dataset, no_cluster

pytestmark = pytest.mark.system

OPTIMIZER = {"learning_rate": 2e-2, "schedule": "constant", "warmup_share": 0.0}
COMMON = {
    "dataset": "prompts", "steps": 4, "prompts_per_step": 4, "sampling": {"max_tokens": 4},
    # Rewards count the letters of a completion, special tokens not among them.
    "rollout": {"max_length": 32, "cpu_cache_gib": 0.25, "skip_special_tokens": True},
    "engine": {"dtype": "float32", "zero_stage": 2},
}  # fmt: skip
SHORT = {"short": {"type": "function", "path": "reward.py"}}
THREE = {
    "taste": {"type": "reward_model", "weight": 0.5, "placement": {"cpus_per_worker": 0.5}},
    "lines": {"type": "process_reward_model"}, **SHORT,
}  # fmt: skip
PROMPTS = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("one", "two", "three", "four")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Input:
    source = ScratchModel(type="scratch", hidden_size=64, intermediate_size=64, layers=2, heads=2, context_length=64)
    context = LocalContext(tmp_path_factory.mktemp("base"))
    output = base.run(BaseModelConfig(source=source, dtype="float32"), {}, context)
    return local_input(output.folder, Kind.POLICY)


@pytest.fixture(scope="module")
def classifier(model: Input) -> PreTrainedModel:
    torch.manual_seed(1)
    made = AutoModelForSequenceClassification.from_pretrained(model.folder, num_labels=1)
    made.config.update({"reward_mean": 0.5, "reward_std": 2.0})
    return made


@pytest.fixture(scope="module")
def reward_model(model: Input, classifier: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Input:
    folder = tmp_path_factory.mktemp("reward")
    classifier.save_pretrained(folder)
    copy_tokenizer(model.folder, folder)
    return local_input(folder, Kind.REWARD_MODEL)


@pytest.fixture(scope="module")
def foreign_reward_model(classifier: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Input:
    """Reads `say` as one token, which the policy spells."""
    folder = tmp_path_factory.mktemp("foreign")
    tokenizer = word_level_tokenizer(["say"], context_length=64)
    larger = deepcopy(classifier)
    larger.resize_token_embeddings(len(tokenizer))
    larger.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return local_input(folder, Kind.REWARD_MODEL)


def run(
    folder: Path,
    config: dict[str, Any],
    model: Input,
    cluster: Cluster,
    others: dict[str, Input] | None = None,
) -> tuple[Output, LocalContext]:
    inputs = {"model": model, "dataset": dataset(folder / "prompts", PROMPTS), **(others or {})}
    context = context_of(folder / "work", inputs)
    context.user_files_root = folder
    return rl.run(RLConfig.model_validate({**COMMON, **config}), inputs, context, cluster), context


def write_reward(folder: Path, body: str) -> None:
    (folder / "reward.py").write_text(f"def reward(completions, prompts, rows):\n    {body}\n")


@pytest.mark.slow("RL on Ray until it has learned")
def test_grpo_with_a_users_function_learns_and_proves_every_publish(
    model: Input, in_process: InProcessCluster, tmp_path: Path
) -> None:
    write_reward(tmp_path, "return [float(len(c) <= 1) for c in completions]")
    block = {"rewards": SHORT, "group_size": 8, "optimizer": OPTIMIZER}
    validation = {
        "dataset": "prompts", "every_steps": 6, "scorers": SHORT, "samples": 2,
        "metric": "sampled_mean_score",
    }  # fmt: skip
    config = {
        "algorithm": "grpo",
        "grpo": block,
        "steps": 12,
        "hybrid": True,
        "ema_decay": 0.5,
        "validation": validation,
    }
    too_long = {"prompt": [{"role": "user", "content": "x" * 30}]}
    prompts = dataset(tmp_path / "prompts_with_long", [too_long, *PROMPTS], "drop")
    held_out = dataset(tmp_path / "held_out", [*PROMPTS, too_long, too_long], "drop")
    inputs = {"dataset": prompts, "validation.dataset": held_out}
    output, context = run(tmp_path, config, model, in_process, inputs)
    assert output.metrics["rows_dropped_too_long"] == 1
    assert output.metrics["validation_rows_dropped_too_long"] == 2
    rewards = [metrics["reward"] for _, metrics in context.logs]
    assert sum(rewards[-4:]) > sum(rewards[:4])  # most random completions are 4 tokens long at first
    assert all(metrics["weight_difference"] < 1e-4 for _, metrics in context.logs)
    assert all(metrics["rollout_mismatch"] < 1e-4 for _, metrics in context.logs)
    assert [step for step, metrics in context.logs if "validation/sampled_mean_score" in metrics] == [5, 11]
    assert output.metrics["validation_best"] == max(m.get("validation/sampled_mean_score", 0) for _, m in context.logs)
    assert output.kind is Kind.POLICY
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (model.folder, output.folder))
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


@pytest.mark.slow("RL with ranks and engines")
@pytest.mark.endurance("rl-matrix")
def test_grpo_samples_and_judges_while_it_trains(
    model: Input, reward_model: Input, ray_cluster: None, tmp_path: Path
) -> None:
    write_reward(tmp_path, "return [float(len(c) <= 1) for c in completions]")
    mismatch = {"correction": "truncate", "low": 0.0, "high": 2.0}
    taste = {"type": "reward_model", "weight": 0.01, "placement": {"cpus_per_worker": 0.5}}
    config = {
        "algorithm": "grpo", "steps": 10, "asynchronous": {"max_lag": 2},
        "grpo": {"rewards": {**SHORT, "taste": taste}, "group_size": 8, "optimizer": OPTIMIZER, "mismatch": mismatch},
        "rollout": {**COMMON["rollout"], "repeatable": False, "cpus_per_engine": 0.5},
        "validation": {"dataset": "prompts", "every_steps": 5, "scorers": SHORT},
    }  # fmt: skip
    others = {
        "validation.dataset": dataset(tmp_path / "held_out", PROMPTS), "grpo.rewards.taste.model": reward_model,
    }  # fmt: skip
    _, context = run(tmp_path, config, model, RayCluster(), others)
    rewards = [metrics["reward/short"] for _, metrics in context.logs]
    assert sum(rewards[-4:]) > sum(rewards[:4])
    assert all(metrics["weight_difference"] < 1e-4 for _, metrics in context.logs)
    lags = [metrics["asynchronous/largest_lag"] for _, metrics in context.logs]
    assert 1 <= max(lags) <= 2
    assert context.logs[0][1]["rollout_mismatch"] < 1e-4  # of the weights that sampled it


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("RL on Ray until it has learned")
def test_ppo_with_a_reward_model_its_critic_and_rewards_of_steps(
    model: Input, reward_model: Input, ray_cluster: None, tmp_path: Path
) -> None:
    write_reward(tmp_path, "return [float(len(c) <= 1) for c in completions]")
    block = {
        "rewards": THREE, "group_size": 2, "kl": {"coefficient": 0.05, "target": 0.01}, "optimizer": OPTIMIZER,
        "critic": {"optimizer": OPTIMIZER, "save": True}, "epochs": 2, "minibatches": 2,
        "mismatch": {"correction": "truncate", "low": 0.0, "high": 2.0},
    }  # fmt: skip
    config = {"algorithm": "ppo", "ppo": block, "engine": {"dtype": "float32", "zero_stage": 3}, "hybrid": True}
    inputs = {f"ppo.rewards.{name}.model": reward_model for name in ("taste", "lines")}
    output, context = run(tmp_path, config, model, RayCluster(), inputs)
    first, last = context.logs[0][1], context.logs[-1][1]
    assert {"reward", "kl", "value_loss", "policy_loss", "clip_fraction", "value_clip_fraction"} <= last.keys()
    assert first["kl"] == pytest.approx(0.0, abs=1e-5)
    assert last["kl"] > 0
    assert output.metrics["reward"] == last["reward"]
    weighted = 0.5 * last["reward/taste"] + last["reward/short"] + last["reward/lines"]
    assert last["reward"] == pytest.approx(weighted, abs=1e-5)
    assert last["reward/lines/steps"] >= 1
    assert last["reward/lines"] != 0
    coefficient = 0.05
    for _, metrics in context.logs:
        assert metrics["kl_coefficient"] == pytest.approx(coefficient)
        error = metrics["kl_per_completion"] / 0.01 - 1
        coefficient *= 1 + min(max(error, -0.2), 0.2) / 10
    critic, start = (AutoModelForSequenceClassification.from_pretrained(f).state_dict() for f in (
        output.folder / "critic", reward_model.folder
    ))  # fmt: skip
    assert not torch.equal(critic["score.weight"], start["score.weight"])


@pytest.mark.slow("RL with ranks and engines")
@pytest.mark.endurance("rl-matrix")
@pytest.mark.parametrize("serve_adapter", ["adapter", "merged"])
def test_a_lora_policy_is_served_either_way_and_trained_on_what_filtering_kept(
    model: Input, foreign_reward_model: Input, in_process: InProcessCluster, tmp_path: Path, serve_adapter: str
) -> None:
    write_reward(
        tmp_path,
        "odd = [float(bool(c) and ord(c[0]) % 2) for c in completions]\n"
        "    lines = [[line for line in c.split('\\n') if line.strip()] or [c] for c in completions]\n"
        "    return [{'reward': o, 'score': o, 'steps': [0.1 * o] * len(l)} for o, l in zip(odd, lines)]",
    )
    block = {
        "rewards": {"taste": {"type": "reward_model", "weight": 0.1}, **SHORT}, "group_size": 4,
        "kl": {"coefficient": 0.01}, "optimizer": OPTIMIZER, "filtering": {"max_rounds": 16},
    }  # fmt: skip
    config: dict[str, Any] = {"algorithm": "grpo", "grpo": block, "lora": {"rank": 4}, "hybrid": True}
    config["rollout"] = {"max_length": 32, "cpu_cache_gib": 0.25, "serve_adapter": serve_adapter}
    output, context = run(tmp_path, config, model, in_process, {"grpo.rewards.taste.model": foreign_reward_model})
    assert output.kind is Kind.ADAPTER
    assert all(metrics["weight_difference"] < 1e-4 for _, metrics in context.logs)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model.folder), output.folder)
    factors = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert factors
    assert any(float(p.abs().max()) > 0 for p in factors)
    for _, metrics in context.logs:
        assert 0.25 <= metrics["score"] <= 0.75  # of groups of four, neither all right nor all wrong
        assert 4 / metrics["filtering/groups"] == pytest.approx(metrics["filtering/kept_share"])


def test_a_reward_that_fails_ends_the_stage_with_its_traceback(model: Input, tmp_path: Path) -> None:
    write_reward(tmp_path, "raise ValueError('no such answer')")
    block = {"rewards": SHORT, "group_size": 2, "optimizer": OPTIMIZER}
    with pytest.raises(RewardError, match=r"(?s)reward.py.*no such answer"):
        run(tmp_path, {"algorithm": "grpo", "grpo": block}, model, InProcessCluster(torch_engine))


def test_a_critic_cannot_start_from_a_reward_model_with_another_tokenizer(
    model: Input, foreign_reward_model: Input, tmp_path: Path
) -> None:
    block = {"rewards": {"taste": {"type": "reward_model"}}, "optimizer": OPTIMIZER, "critic": {"optimizer": OPTIMIZER}}
    inputs = {"ppo.rewards.taste.model": foreign_reward_model}
    with pytest.raises(
        StageError, match=r"ppo\.critic\.start: .* differs from the policy's: set critic\.start: policy"
    ):
        run(tmp_path, {"algorithm": "ppo", "ppo": block}, model, no_cluster, inputs)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            {"critic": {"optimizer": OPTIMIZER}},
            r"^ppo\.critic\.start: the input ppo\.rewards\.taste\.model: its context",
        ),
        (
            {"critic": {"optimizer": OPTIMIZER, "start": "policy"}},
            r"^ppo\.rewards\.taste: its context is 16 tokens, and seq",
        ),
    ],
)
def test_a_model_whose_context_is_shorter_than_a_sequence_is_refused(
    model: Input, classifier: PreTrainedModel, tmp_path: Path, block: dict[str, Any], said: str
) -> None:
    """With rotary embeddings it would compute all the same, with positions that it has never seen."""
    classifier.save_pretrained(tmp_path / "short")
    copy_tokenizer(model.folder, tmp_path / "short")
    stored = json.loads((tmp_path / "short/config.json").read_text())
    (tmp_path / "short/config.json").write_text(json.dumps(stored | {"max_position_embeddings": 16}))
    inputs = {"ppo.rewards.taste.model": local_input(tmp_path / "short", Kind.REWARD_MODEL)}
    settings = {"rewards": {"taste": {"type": "reward_model"}}, "optimizer": OPTIMIZER, **block}
    with pytest.raises(StageError, match=said):
        run(tmp_path, {"algorithm": "ppo", "ppo": settings}, model, no_cluster, inputs)


@pytest.mark.endurance("rl-matrix")
@pytest.mark.slow("RL on Ray twice")
@pytest.mark.timeout(900)
def test_models_in_groups_of_two_workers_train_what_they_train_beside_the_policy(
    model: Input, reward_model: Input, ray_cluster: None, tmp_path: Path
) -> None:
    """To the digit: the critic with a reward model on workers of their own, another one and the reference on others."""
    inputs = {f"ppo.rewards.{name}.model": reward_model for name in ("taste", "lines")}
    two = {"workers": 2, "cpus_per_worker": 0.25, "threads": 1}
    lines, kept = [], []
    for number, (values, frozen) in enumerate([
        ({}, {}),
        ({"placement": {**two, "group": "values"}}, {"placement": {**two, "group": "frozen"}, "offload": True}),
    ]):  # fmt: skip
        rewards = {"taste": {"type": "reward_model", **values}, "lines": {"type": "process_reward_model", **frozen}}
        block = {
            "rewards": rewards, "group_size": 2, "kl": {"coefficient": 0.05, **frozen}, "optimizer": OPTIMIZER,
            "critic": {"optimizer": OPTIMIZER, "save": True, **values}, "minibatches": 2,
        }  # fmt: skip
        rollout = {**COMMON["rollout"], "cpus_per_engine": 0.5, "threads": 1}
        config = {"algorithm": "ppo", "ppo": block, "steps": 2, "placement": two, "rollout": rollout}
        output, context = run(tmp_path / str(number), config, model, RayCluster(), inputs)
        lines.append([without_times(metrics) for _, metrics in context.logs])
        kept.append([(output.folder / path / "model.safetensors").read_bytes() for path in (".", "critic")])
    assert len(lines[0]) == 2
    assert lines[1] == lines[0]
    assert kept[1] == kept[0]
