"""One rank of an RL run in this process: its settings, its driver's side, and an experience. A plain module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.algorithms import build_algorithm
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.rl.experience import pack_trajectories
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.training.group import InlineGroup
from rlhf_core.types import Prompt, Rollouts, Scored, TrainingBatch, Trajectory
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import context_of

OPTIMIZER = {"learning_rate": 1e-2, "schedule": "constant", "warmup_share": 0.0}


def tiny_llama(folder: Path, **config: Any) -> Input:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=20, pad_token_id=0, **shape, **config)).save_pretrained(folder)
    return local_input(folder, Kind.POLICY)


def rl_config(algorithm: str, **settings: Any) -> RLConfig:
    block = {"rewards": {"exact": {"type": "verifier"}}, "optimizer": OPTIMIZER, "group_size": 2, **settings}
    extra = {key: block.pop(key) for key in ("lora", "dropout", "engine", "sampling", "placement") if key in block}
    if algorithm == "ppo":
        block["critic"] = {"optimizer": OPTIMIZER, **block.get("critic", {})}
    if algorithm == "on-policy-distillation":
        block["teacher"] = {"model": "teacher", **block.get("teacher", {})}
    return RLConfig.model_validate({
        "algorithm": algorithm, ALGORITHMS[algorithm].block: block, "dataset": "p", "steps": 5, "prompts_per_step": 2,
        "sampling": {"max_tokens": 4}, "rollout": {"max_length": 8},
        "engine": {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 12}, **extra,
    })  # fmt: skip


def trainer(
    config: RLConfig, model: Input, folder: Path, others: Mapping[str, Input] | None = None
) -> tuple[PolicyTrainer, InlineGroup[RLWorker]]:
    """others: by input; a teacher that is not among them is the policy."""
    inputs = {"model": model, config.teacher_input: model, **(others or {})}
    group = InlineGroup(RLWorker, config, context_of(folder, inputs), roles(config, inputs))
    return PolicyTrainer(config, build_algorithm(config), group, seed=0), group


def trajectories() -> Rollouts:
    return pack_trajectories(episodes())


def episodes(hint: tuple[int, ...] = ()) -> list[Trajectory]:
    """hint: tokens that a teacher reads behind each prompt, the second prompt's twice."""
    made = []
    for i, completion in enumerate([(5, 6, 7), (8, 9), (10, 11, 12, 13), (14,)]):
        asked = (2, 3, 4 + i // 2)
        prompt = Prompt(str(i // 2), "", asked, row={}, hinted_ids=asked + hint * (1 + i // 2) if hint else ())
        ids = torch.tensor([*prompt.token_ids, *completion])
        mask = torch.arange(ids.numel()) >= 3
        made.append(Trajectory(prompt, ids, mask, torch.zeros(ids.numel()), 0, "stop"))
    return made


def with_advantages(config: RLConfig, ours: PolicyTrainer, scored: Scored) -> TrainingBatch:
    """Completions 0 and 3 are rewarded; 0 and 1 are of one prompt, 2 and 3 of another."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    return build_algorithm(config).advantages(scored, rewards, groups, ours.kl_coefficient, {"exact": rewards})
