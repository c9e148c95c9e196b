"""The recipe of a run whose parts are killed: `tiny`, with many checkpoints, and with less to compute between kills."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from deployments.stack.environment import RECIPES

CHECKPOINT_STEPS = 5
WHOLE = bool(os.environ.get("CHAOS_WHOLE"))  # as much to compute as in `tiny`
_CHECKPOINTS: dict[str, Any] = {
    "sft": {"checkpoint": {"every_steps": CHECKPOINT_STEPS}}, "rl": {"checkpoint": {"every_steps": 1}},
}  # fmt: skip
FEW_ROWS: dict[str, Any] = {  # of the data of `tiny`
    "text": {"source": {"options": {"words": 500, "others": 50}}},
    "conversations": {"source": {"options": {"size": 500}}},
    "prompts": {"source": {"options": {"size": 200}}},
    "held_out": {"source": {"options": {"size": 50}}},
}
_LESS: dict[str, Any] = {
    "data": FEW_ROWS,
    "pretrain": {"max_steps": 10, "batch_size": 8},
    "sft": {"batch_size": 4, "max_steps": 300},
    "rl": {"steps": 10, "prompts_per_step": 2, "rollout": {"cpu_cache_gib": 0.25}},
    "evaluation": None,
}


def write_recipes(folder: Path) -> None:
    """`chaos`, in JSON, which is YAML too."""
    shutil.copytree(RECIPES, folder)
    recipe: dict[str, Any] = {"extends": "tiny", "name": "chaos", **({} if WHOLE else _LESS)}
    for stage, often in _CHECKPOINTS.items():
        recipe[stage] = {**recipe.get(stage, {}), **often}
    (folder / "chaos.yaml").write_text(json.dumps(recipe))
