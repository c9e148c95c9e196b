"""A loop of quick rounds: a model from scratch learns by DPO to answer with one letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LETTER = "a"
PROMPTS = 480
PER_ROUND = 8
_ENGINE = {"max_length": 24, "cpu_cache_gib": 0.25}
_OWN = {"type": "function", "path": "letters.py", "function": "share"}
RECIPE: dict[str, Any] = {
    "name": "letters", "tracking": {"wandb": False, "tensorboard": False}, "report": None,
    "data": {
        "fresh": {"format": "prompts", "source": {"type": "files", "paths": ["fresh.jsonl"]}, "near_duplicates": "off"},
        "held_out": {
            "format": "prompts", "source": {"type": "files", "paths": ["held_out.jsonl"]}, "near_duplicates": "off"
        },
    },
    "base": {
        "dtype": "float32",
        "source": {"type": "scratch", "hidden_size": 64, "intermediate_size": 64, "layers": 1, "heads": 1,
                   "context_length": 32},
    },
    "loop": {
        "start": "base", "candidate": "dpo", "prompts": "fresh", "prompts_per_round": PER_ROUND,
        "gate": {"completions": "sampled", "margin": 0.02},
    },
    "sampled": {
        "stage": "generate", "dataset": "fresh", "model": "accepted", "samples": 16,
        "sampling": {"max_tokens": 4}, "rollout": _ENGINE, "rewards": {"own": _OWN},
    },
    "pairs": {"dataset": "sampled"},
    "dpo": {
        "stage": "preference", "dataset": "pairs", "model": "accepted", "batch_size": 4, "max_length": 24,
        "epochs": 4, "losses": {"dpo": {"type": "dpo", "beta": 0.5}},
        "engine": {"dtype": "float32", "zero_stage": 0}, "checkpoint": {"every_steps": 1},
    },
    "evaluation": {
        "dataset": "held_out", "models": ["accepted", "dpo"], "samples": 8, "pass_at": [1],
        "scorers": {"own": _OWN}, "sampling": {"max_tokens": 4}, "rollout": _ENGINE,
    },
}  # fmt: skip
_CODE = f'''
def share(completions, prompts, rows):
    return [text.count("{LETTER}") / max(len(text), 1) for text in completions]
'''


def write_loop_recipe(folder: Path, learning_rate: float) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "letters.py").write_text(_CODE)
    for name, size in (("fresh", PROMPTS), ("held_out", 32)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{name[0]}{number}"}) + "\n" for number in range(size))
        )
    path = folder / "letters.yaml"
    dpo = RECIPE["dpo"] | {"optimizer": {"learning_rate": learning_rate}}
    path.write_text(json.dumps(RECIPE | {"dpo": dpo}))  # which is YAML too
    return path
