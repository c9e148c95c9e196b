"""A reward model whose training is killed and run again is, to the bit, the one it would have been, and as sure."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.checkpoint import CheckpointConfig
from rlhf_core.config.reward_models import RewardModelConfig
from rlhf_core.stages import reward_model
from tests.rlhf_core.stages.killed_runs import require_resumed
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER, base_model, dataset, pairs

CONFIG = RewardModelConfig(
    dataset="d", batch_size=7, epochs=2, max_length=32, optimizer=OPTIMIZER, engine=ENGINE, log_every=1,
    checkpoint=CheckpointConfig(every_steps=2),
)  # fmt: skip


def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    inputs = {"model": base_model(tmp_path / "base"), "dataset": dataset(tmp_path / "data", pairs(30))}
    folder = "work/reward_model"
    require_resumed(
        reward_model.run, CONFIG, inputs, tmp_path,
        f"{folder}/model.safetensors", f"{folder}/config.json", "shared.safetensors",
    )  # fmt: skip
