"""Each stage that trains is stopped and run again, here in one process; those of SFT and RL are killed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.contract import Input
from rlhf_core.models.quantisation import write_rounded
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.stages.table import STAGES
from rlhf_core.testing.stage import StageContract, StageRun
from tests.rlhf_core.rl.torch_engine import torch_engine
from tests.rlhf_core.stages.context import local_input
from tests.rlhf_core.stages.supervised_runs import base_model, conversations, dataset, pairs

pytestmark = pytest.mark.parts

SUPERVISED: dict[str, Any] = {
    "dataset": "d", "batch_size": 7, "epochs": 2, "max_steps": 4, "max_length": 48, "log_every": 3,
    "optimizer": {"learning_rate": 5e-3}, "checkpoint": {"every_steps": 2},
    "engine": {"dtype": "float32", "zero_stage": 0, "tokens_per_micro_batch": 128},
}  # fmt: skip
ADAPTER: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.2}}  # random numbers in every forward, and frozen weights
VALIDATION: dict[str, Any] = {"validation": {"dataset": "v", "every_steps": 2}}
Rows = Sequence[Mapping[str, Any]]


def stage_run(folder: Path, stage: str, rows: Rows, settings: Mapping[str, Any], **inputs: Input) -> StageRun:
    """A run of four steps, in two epochs, over the first 20 rows; the others are for validation."""
    config = STAGES[stage].config.model_validate({**SUPERVISED, **settings})
    held_out = {"validation.dataset": dataset(folder / "v", rows[20:])} if "validation" in settings else {}
    inputs = {"model": base_model(folder / "base"), "dataset": dataset(folder / "d", rows[:20]), **held_out, **inputs}
    return StageRun(STAGES[stage], config, inputs, folder)


class TestPretrain(StageContract):
    def make(self, folder: Path) -> StageRun:
        return stage_run(folder, "pretrain", [{"text": f"the cat {'abcdefghij'[i % 10]}"} for i in range(20)], {})


@pytest.mark.endurance("chaos")
class TestPretrainOfAnAdapter(StageContract):
    def make(self, folder: Path) -> StageRun:
        lora = {"lora": {"rank": 4, "dora": True, "rank_stabilised": True, "modules_to_save": ("norm",)}}
        return stage_run(folder, "pretrain", [{"text": f"the cat {'abcdefghij'[i % 10]}"} for i in range(20)], lora)


class TestSFT(StageContract):
    def make(self, folder: Path) -> StageRun:
        return stage_run(folder, "sft", conversations(24), ADAPTER | VALIDATION)


@pytest.mark.endurance("chaos")
class TestSFTOfAQuantisedBase(StageContract):
    def make(self, folder: Path) -> StageRun:
        write_rounded(base_model(folder / "whole").folder, folder / "rounded", "float32")
        model = local_input(folder / "rounded", Kind.POLICY)
        lora = {"lora": {"rank": 4, "dropout": 0.2, "quantised": "nf4"}}
        return stage_run(folder, "sft", conversations(24), lora | VALIDATION, model=model)


@pytest.mark.endurance("chaos")
class TestPreference(StageContract):
    def make(self, folder: Path) -> StageRun:
        losses = {"dpo": {"type": "dpo"}, "nll": {"type": "nll"}}
        return stage_run(folder, "preference", pairs(24), {"losses": losses})


@pytest.mark.endurance("chaos")
class TestPreferenceOfAnAdapter(StageContract):
    def make(self, folder: Path) -> StageRun:
        settings = {"losses": {"dpo": {"type": "dpo"}}, "dropout": True, **ADAPTER, **VALIDATION}
        return stage_run(folder, "preference", pairs(24), settings)


@pytest.mark.endurance("chaos")
class TestKTO(StageContract):
    def make(self, folder: Path) -> StageRun:
        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in pairs(12)
            for side in ("chosen", "rejected")
        ]
        return stage_run(folder, "kto", rows, {"dropout": True, **ADAPTER, **VALIDATION})


@pytest.mark.endurance("chaos")
class TestRewardModel(StageContract):
    def make(self, folder: Path) -> StageRun:
        return stage_run(folder, "reward_model", pairs(20), {"max_length": 32, "log_every": 1})


@pytest.mark.endurance("chaos")
class TestRewardRegression(StageContract):
    def make(self, folder: Path) -> StageRun:
        rows = [
            {"prompt": row["prompt"], "completions": [{"text": row["chosen"], "reward": 1.5 - i % 2}]}
            for i, row in enumerate(pairs(20))
        ]
        return stage_run(folder, "reward_regression", rows, {})


@pytest.mark.endurance("chaos")
class TestProcessRewardModel(StageContract):
    def make(self, folder: Path) -> StageRun:
        rows = [
            {"prompt": row["prompt"], "steps": ["ab", "z" * (1 + i % 2)], "labels": [1.0, float(i % 2)]}
            for i, row in enumerate(pairs(24))
        ]
        return stage_run(folder, "process_reward_model", rows, {"separator": "; ", **ADAPTER, **VALIDATION})


@pytest.mark.endurance("chaos")
class TestDistillation(StageContract):
    def make(self, folder: Path) -> StageRun:
        settings = {"teacher": {"model": "t"}, "temperature": 2.0, "cross_entropy_coefficient": 0.2, **VALIDATION}
        teacher = {"teacher.model": base_model(folder / "teacher", seed=1, hidden=48)}
        return stage_run(folder, "distillation", conversations(24), settings, **teacher)


class TestRL(StageContract):
    """With engines of its own in this process: a critic, a KL that is controlled, and kept rollouts and policies."""

    def cluster(self) -> Cluster:
        return InProcessCluster(torch_engine)

    def make(self, folder: Path) -> StageRun:
        optimizer = {"learning_rate": 1e-2}
        block = {
            "rewards": {"exact": {"type": "verifier"}}, "optimizer": optimizer, "group_size": 2, "epochs": 2,
            "minibatches": 2, "critic": {"optimizer": optimizer, "warmup_steps": 1},
            "kl": {"coefficient": 0.1, "target": 0.5, "horizon": 4},
        }  # fmt: skip
        config = STAGES["rl"].config.model_validate({
            "algorithm": "ppo", "ppo": block, "dataset": "d", "steps": 4, "prompts_per_step": 2,
            "sampling": {"max_tokens": 2}, "rollout": {"max_length": 24}, "checkpoint": {"every_steps": 2},
            "engine": {"dtype": "float32", "zero_stage": 0}, "keep": {"rollouts_every": 1, "policy_every": 2},
        })  # fmt: skip
        rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcdefg"]
        inputs = {"model": base_model(folder / "base"), "dataset": dataset(folder / "d", rows)}
        return StageRun(STAGES["rl"], config, inputs, folder)


class TestRLByDifficulty(StageContract):
    """Its prompts, and the groups that it replays, depend on the scores of earlier steps."""

    def cluster(self) -> Cluster:
        return InProcessCluster(torch_engine)

    def make(self, folder: Path) -> StageRun:
        block = {
            "rewards": {"exact": {"type": "verifier", "pattern": "(.)"}}, "optimizer": {"learning_rate": 1e-2},
            "group_size": 16, "mismatch": {"correction": "truncate", "low": 0.0, "high": 2.0},
        }  # fmt: skip
        config = STAGES["rl"].config.model_validate({
            "algorithm": "grpo", "grpo": block, "dataset": "d", "steps": 6, "prompts_per_step": 4,
            "sampling": {"max_tokens": 1}, "rollout": {"max_length": 24}, "checkpoint": {"every_steps": 2},
            "engine": {"dtype": "float32", "zero_stage": 0}, "replay": {"share": 0.5, "max_age": 2},
            "select": {"pass_rate": (0.01, 0.9), "curriculum": {"start": (0.0, 1.0), "steps": 4}, "forget_after": 3},
        })  # fmt: skip
        rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcdefg"]
        inputs = {"model": base_model(folder / "base"), "dataset": dataset(folder / "d", rows)}
        return StageRun(STAGES["rl"], config, inputs, folder)
