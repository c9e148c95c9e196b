"""The recipe of a run whose parts are killed: a model that is trained for many small steps, then with RL."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from deployments.stack.environment import RECIPES

CHECKPOINT_STEPS = 5
SHIPPED = os.environ.get("CHAOS_RECIPE")  # by name, in place of RECIPE; with stages `pretrain`, `sft` and `rl`
RECIPE: dict[str, Any] = {
    "name": "chaos", "tracking": {"wandb": False, "tensorboard": False},
    "data": {
        "talks": {"format": "conversations", "source": {"type": "files", "paths": ["talks.jsonl"]}},
        "asked": {"format": "prompts", "source": {"type": "files", "paths": ["asked.jsonl"]}},
    },
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
    "rl": {
        "algorithm": "grpo", "dataset": "asked", "steps": 20, "prompts_per_step": 2, "sampling": {"max_tokens": 4},
        "rollout": {"max_length": 24, "cpu_cache_gib": 0.25},
        "grpo": {
            "rewards": {"exact": {"type": "verifier", "kind": "exact"}}, "group_size": 2,
            "optimizer": {"learning_rate": 1e-2},
        },
        "engine": {"dtype": "float32", "zero_stage": 0}, "checkpoint": {"every_steps": 1},
    },
}  # fmt: skip


def write_recipe(folder: Path) -> Path:
    path = folder / "chaos.yaml"
    if SHIPPED:
        shutil.copytree(RECIPES, folder)
        often = {stage: {"checkpoint": RECIPE[stage]["checkpoint"]} for stage in ("sft", "rl")}
        recipe = {"extends": SHIPPED, "name": "chaos", "pretrain": {"max_steps": 50}, **often}
        path.write_text(json.dumps(recipe))  # which is YAML too
        return path
    folder.mkdir()
    talks = [{"prompt": f"t{i}", "completion": f"{i}"} for i in range(8)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    asked = [{"prompt": f"a{i}", "answer": "1"} for i in range(4)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    path.write_text(json.dumps(RECIPE))
    return path
