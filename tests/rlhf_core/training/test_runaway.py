"""A run whose weights run away skips its updates, and ends after a few: SFT, reward model, RL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.algorithms import build_algorithm
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.errors import StageError
from rlhf_core.packing import pack
from rlhf_core.rl.ranks import PolicyTrainer
from rlhf_core.rl.roles import roles
from rlhf_core.rl.worker import RLWorker
from rlhf_core.stages import reward_model, sft
from rlhf_core.training.group import InlineGroup
from rlhf_core.types import TrainingBatch
from tests.rlhf_core.stages.supervised_runs import (
    ENGINE,
    base_model,
    context_of,
    conversations,
    dataset,
    inline,
    pairs,
)

pytestmark = pytest.mark.parts

SETTINGS = {"learning_rate": 1.0, "warmup_share": 0.0, "max_skipped_updates": 2}
ENDED = r"^2 updates in a row were skipped, the last at optimizer step 2: their gradient was not finite; "


def runaway(optimizer: OptimizerConfig) -> OptimizerConfig:
    """At a learning rate that no recipe may have, so that the second gradient is not finite."""
    object.__setattr__(optimizer, "learning_rate", 1e30)
    return optimizer


RUNAWAY = runaway(OptimizerConfig.model_validate(SETTINGS))


def test_sft_ends_and_has_said_so(tmp_path: Path) -> None:
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "data", conversations(12))}
    config = SFTConfig(dataset="d", batch_size=2, max_length=32, optimizer=RUNAWAY, engine=ENGINE, log_every=1)
    context = context_of(tmp_path / "run", inputs)
    with pytest.raises(StageError, match=ENDED):
        sft.run(config, inputs, context, inline)
    assert [metrics["skipped_updates"] for _, metrics in context.logs] == [0.0, 1.0]


def test_a_reward_model_ends(tmp_path: Path) -> None:
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "data", pairs(12))}
    config = RewardModelConfig(dataset="d", batch_size=2, max_length=32, optimizer=RUNAWAY, engine=ENGINE)
    with pytest.raises(StageError, match=ENDED):
        reward_model.run(config, inputs, context_of(tmp_path / "run", inputs), inline)


def test_rl_counts_and_ends(tmp_path: Path) -> None:
    model = base_model(tmp_path / "base")
    config = RLConfig.model_validate({
        "algorithm": "grpo", "dataset": "p", "steps": 8, "prompts_per_step": 2, "sampling": {"max_tokens": 4},
        "rollout": {"max_length": 8}, "engine": {"dtype": "float32", "zero_stage": 0},
        "grpo": {
            "rewards": {"exact": {"type": "verifier"}}, "group_size": 2,
            "optimizer": SETTINGS,
        },
    })  # fmt: skip
    runaway(config.settings.optimizer)
    group = InlineGroup(
        RLWorker, config, context_of(tmp_path / "run", {"model": model}), roles(config, {"model": model})
    )
    trainer = PolicyTrainer(config, build_algorithm(config), group, seed=0)
    batch = pack([[5, 6, 7, 8]] * 4, [[False, False, True, True]] * 4)
    batch = TrainingBatch(
        **vars(batch), rollout_logprobs=torch.zeros(batch.num_tokens),
        advantages=torch.linspace(-1, 1, batch.num_tokens),
    )  # fmt: skip
    assert [trainer.update(batch, step).metrics["skipped_updates"] for step in range(2)] == [0.0, 1.0]
    with pytest.raises(StageError, match=ENDED):
        trainer.update(batch, 2)
