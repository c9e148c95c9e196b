"""The recipe of a run whose parts are killed: a model that is trained for many small steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHECKPOINT_STEPS = 5
RECIPE: dict[str, Any] = {
    "name": "chaos", "tracking": {"wandb": False, "tensorboard": False},
    "data": {"talks": {"format": "conversations", "source": {"type": "files", "paths": ["talks.jsonl"]}}},
    "base": {
        "dtype": "float32",
        "source": {"type": "scratch", "hidden_size": 64, "intermediate_size": 64, "layers": 1, "heads": 1,
                   "context_length": 32},
    },
    "sft": {
        "dataset": "talks", "batch_size": 4, "max_length": 24, "epochs": 600, "max_steps": 1000,
        "optimizer": {"learning_rate": 1e-2}, "engine": {"dtype": "float32", "zero_stage": 0},
        "checkpoint": {"every_steps": CHECKPOINT_STEPS},
    },
}  # fmt: skip
# The long form continues with RL, whose engine is killed too.
RL: dict[str, Any] = {
    "algorithm": "grpo", "dataset": "asked", "steps": 60, "prompts_per_step": 2,
    "sampling": {"max_tokens": 4}, "rollout": {"max_length": 24, "cpu_cache_gib": 0.25},
    "grpo": {
        "rewards": {"exact": {"type": "verifier", "kind": "exact"}}, "group_size": 2,
        "optimizer": {"learning_rate": 1e-2},
    },
    "engine": {"dtype": "float32", "zero_stage": 0}, "checkpoint": {"every_steps": 1},
}  # fmt: skip


def write_recipe(folder: Path, *, long: bool = False) -> Path:
    folder.mkdir()
    talks = [{"prompt": f"t{i}", "completion": f"{i}"} for i in range(8)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    (folder / "asked.jsonl").write_text(
        "".join(json.dumps({"prompt": f"a{i}", "answer": "1"}) + "\n" for i in range(4))
    )
    recipe = RECIPE
    if long:
        asked = {"format": "prompts", "source": {"type": "files", "paths": ["asked.jsonl"]}}
        recipe = {**RECIPE, "data": {**RECIPE["data"], "asked": asked}, "rl": RL}
    path = folder / "chaos.yaml"
    path.write_text(json.dumps(recipe))  # which is YAML too
    return path
