"""Recipes of which parts are killed at random moments: a graph, a loop, and an agent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from deployments.stack.environment import RECIPES
from tests.chaos.loop_recipe import write_loop_recipe
from tests.chaos.recipe import FEW_ROWS

# A frozen process is noticed after a minute, not after half an hour.
_WATCHDOG = {"factor": 3, "minutes": 1}
CHECKPOINT_STEPS = {"pretrain": 5, "sft": 5, "rl": 1}
_CHECKPOINTS = {stage: {"checkpoint": {"every_steps": steps}} for stage, steps in CHECKPOINT_STEPS.items()}
_TRAINING: dict[str, Any] = {
    "pretrain": {"max_steps": 20, "batch_size": 8, **_CHECKPOINTS["pretrain"]},
    "sft": {"batch_size": 8, "max_steps": 60, **_CHECKPOINTS["sft"]},
}
GRAPH: dict[str, Any] = {
    "extends": "tiny", "name": "killed-graph", "watchdog": _WATCHDOG, "data": FEW_ROWS, **_TRAINING,
    "rl": {"steps": 8, "prompts_per_step": 4, "rollout": {"cpu_cache_gib": 0.25}, **_CHECKPOINTS["rl"]},
    "sampled": {
        "stage": "generate", "dataset": "held_out", "model": "rl", "samples": 8,
        "sampling": {"max_tokens": 16}, "rollout": {"max_length": 96, "cpu_cache_gib": 0.25},
    },
    "evaluation": {"samples": 4, "pass_at": [1, 4], "rollout": {"cpu_cache_gib": 0.25}},
}  # fmt: skip
AGENT: dict[str, Any] = {
    "extends": "tiny-agent", "name": "killed-agent", "watchdog": _WATCHDOG, "data": FEW_ROWS, **_TRAINING,
    "rl": {"steps": 6, "prompts_per_step": 4, "rollout": {"cpu_cache_gib": 0.25}, **_CHECKPOINTS["rl"]},
    "evaluation": {"samples": 2, "pass_at": [1, 2], "rollout": {"cpu_cache_gib": 0.25}},
}  # fmt: skip


def write_recipes(folder: Path) -> dict[str, str]:
    """Write the recipes beside the shipped ones, which they extend; return their paths by name."""
    shutil.copytree(RECIPES, folder)
    for name, recipe in (("graph", GRAPH), ("agent", AGENT)):
        (folder / f"{name}.yaml").write_text(json.dumps(recipe))  # which is YAML too
    loop = write_loop_recipe(folder / "loop", learning_rate=3e-3)
    loop.write_text(json.dumps({**json.loads(loop.read_text()), "watchdog": _WATCHDOG}))
    return {"graph": str(folder / "graph.yaml"), "loop": str(loop), "agent": str(folder / "agent.yaml")}
