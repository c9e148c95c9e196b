"""Rows with pictures, datasets made of them, and settings of RL, for tests of stages."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from rlhf_core.config.base import Config
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.contract import Output
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from rlhf_core.models.vision import open_processor
from rlhf_core.rl.experience import pack_trajectories
from rlhf_core.stages import dataset as dataset_stage
from rlhf_core.types import Trajectory
from tests.rlhf_core.pictures import picture
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER

C = TypeVar("C", bound=Config)
ENGINE_SETTINGS, OPTIMIZER_SETTINGS = (given.model_dump(mode="json") for given in (ENGINE, OPTIMIZER))
COLOURS = ("red", "blue")


def rows(count: int) -> list[dict[str, Any]]:
    """What colour a picture has; every fifth row has none and asks to repeat a word."""
    made: list[dict[str, Any]] = []
    for index in range(count):
        colour = COLOURS[index % 2]
        if index % 5 == 4:
            made.append({"prompt": f"say {colour} {index}", "answer": colour})
            continue
        content = base64.b64encode(picture(colour, (30 + index, 40), kind="PNG" if index % 3 else "JPEG")).decode()
        made.append({"prompt": "colour?", "answer": colour, "image": f"data:image/png;base64,{content}"})
    return made


def valid(config: type[C], settings: dict[str, Any]) -> C:
    return config.model_validate_json(json.dumps(settings))


def made(folder: Path, data_format: str, given: list[dict[str, Any]], **settings: Any) -> Output:
    folder.mkdir(parents=True)
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    source = {"type": "files", "paths": ["d.jsonl"]}
    config = valid(DatasetConfig, {"format": data_format, "source": source, **settings})
    context = LocalContext(folder / "work", user_files_root=folder, name="data.d")
    return dataset_stage.run(config, {}, context)


def pairs(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, "chosen": row["answer"], "rejected": COLOURS[1 - COLOURS.index(row["answer"])]} for row in given
    ]  # fmt: skip


ROLLOUT = {"max_length": 64, "cpu_cache_gib": 0.1}
RL: dict[str, Any] = {
    "algorithm": "grpo", "dataset": "d", "steps": 2, "prompts_per_step": 10, "sampling": {"max_tokens": 4},
    "rollout": ROLLOUT, "engine": ENGINE_SETTINGS,
    "grpo": {
        "rewards": {"exact": {"type": "verifier"}}, "group_size": 3, "kl": {"coefficient": 0.01},
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant", "warmup_share": 0.0},
    },
}  # fmt: skip


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Trajectory]:
    """The trajectories of the first step that will be trained."""
    seen: list[Trajectory] = []

    def pack(trajectories: list[Trajectory], *arguments: Any, **options: Any) -> Any:
        seen.extend(trajectories if not seen else [])
        return pack_trajectories(trajectories, *arguments, **options)

    monkeypatch.setattr("rlhf_core.rl.loop.pack_trajectories", pack)
    return seen


def require_log_probs_of_the_engine(trajectories: list[Trajectory], policy: Path, temperature: float = 1.0) -> None:
    """Of every token that was sampled, by the weights in `policy`."""
    batch = pack_trajectories(trajectories, open_processor(policy))
    model = PolicyModel(load_causal_model(policy, dtype=torch.float32, attention="sdpa").eval())
    with torch.no_grad():
        ours = model(batch, temperature=temperature)[0][batch.loss_mask]
    assert batch.rollout_logprobs is not None
    assert torch.allclose(ours, batch.rollout_logprobs[batch.loss_mask], atol=1e-4)
