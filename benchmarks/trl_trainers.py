"""Common part of TRL's sides: trainers set up for speed on a CPU as by a user.

TRL is unchanged; some of its methods are watched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.workload import Workload

# Settings of each path, for float32 and for bfloat16; `dtype` is that of the trained weights.
_AS_IT_COMES: dict[str, dict[str, Any]] = {  # bfloat16 by autocast over float32 weights, which is TRL's own default
    "float32": {"dtype": "float32", "bf16": False},
    "bfloat16": {"dtype": "float32", "bf16": True},
}
PATHS = {
    "trl": _AS_IT_COMES,
    "trl-jemalloc": _AS_IT_COMES,  # in a process that keeps freed memory, see against_trl
    "trl-bf16-weights": {  # and a bfloat16 optimizer: less work and less exact than a float32 master copy
        "bfloat16": {"dtype": "bfloat16", "bf16": False},
    },
}


@dataclass
class StepTimer(TrainerCallback):
    """Records the beginning of training, and the end of each step."""

    ended: list[float] = field(default_factory=list)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.ended.append(time.perf_counter())


def arguments(workload: Workload, path: str, folder: str) -> dict[str, Any]:
    """Return the config arguments of any trainer."""
    options = dict(PATHS[path][workload.dtype])
    return {
        "output_dir": folder,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": options.pop("dtype"), "attn_implementation": "sdpa"},
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": 0,
        **options,
    }


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "trl")}
