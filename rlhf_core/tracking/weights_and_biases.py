"""The tracker Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.tracking.sink import About


class WeightsAndBiases:
    """Online if there is a key, else offline: `wandb sync` uploads the artifact's folder `wandb` later."""

    def __init__(self, folder: Path, project: str, about: About):
        import wandb

        # An explicit WANDB_MODE takes precedence. Without it, a job must not wait for someone to enter a key.
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        settings = wandb.Settings(
            mode=mode,  # type: ignore[arg-type]  # wandb rejects a wrong WANDB_MODE
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        start: dict[str, Any] = {
            "project": project, "name": about.name, "group": about.run_id or None, "config": dict(about.config),
            "tags": [about.key[:12]], "dir": os.environ.get("WANDB_DIR", str(folder)),
        }  # fmt: skip
        try:
            self._run = wandb.init(**start, settings=settings)
        except wandb.errors.Error as error:
            # An unreachable tracker must not end the training.
            print(f"Weights & Biases cannot be reached, this run is logged offline: {error}", flush=True)
            self._run = wandb.init(**start, settings=settings.model_copy(update={"mode": "offline"}))
        # The metrics of one step may arrive in several calls, and a later call may be about an earlier step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # `finish` returns before the file is complete
