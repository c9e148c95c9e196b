"""The tracker Weights & Biases."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.tracking import TrackingConfig
from rlhf_core.tracking.sink import About


class WeightsAndBiases:
    """Online if there is a key, else offline: `wandb sync` uploads the artifact's folder `wandb` later."""

    def __init__(self, folder: Path, settings: TrackingConfig, about: About):
        import wandb

        # An explicit WANDB_MODE takes precedence. Without it, a job must not wait for someone to enter a key.
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        of_job = wandb.Settings(
            mode=mode,  # type: ignore[arg-type]  # wandb rejects a wrong WANDB_MODE
            silent=True, console="off", disable_git=True, save_code=False,
            x_disable_stats=not settings.wandb_system_metrics, x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        start: dict[str, Any] = {
            "project": settings.wandb_project, "entity": settings.wandb_entity,
            "name": f"{settings.wandb_name}/{about.name}" if settings.wandb_name else about.name,
            "group": settings.wandb_group or about.run_id or None, "config": dict(about.config),
            "tags": [about.key[:12], *settings.wandb_tags], "dir": os.environ.get("WANDB_DIR", str(folder)),
            "id": about.computation,
        }  # fmt: skip
        try:
            self._run = wandb.init(**start, settings=of_job, resume="allow" if mode == "online" else None)
        except wandb.errors.Error as error:
            # An unreachable tracker must not end the training.
            print(f"Weights & Biases cannot be reached, this run is logged offline: {error}", flush=True)
            self._run = wandb.init(**start, settings=of_job.model_copy(update={"mode": "offline"}))
        self._arrived = self._run.step  # lines, of the job that this one resumes
        self._lines = 0
        # The metrics of one step may arrive in several calls, and a later call may be about an earlier step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        if self._lines >= self._arrived:
            self._run.log({"step": step, **metrics}, step=self._lines)
        self._lines += 1

    def log_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """samples: lines of `samples.jsonl`."""
        import wandb

        rows = [
            [sample["id"], sample["prompt"], sample["answer"], completion["text"], score, completion["finish_reason"]]
            for sample in samples
            for completion in sample["completions"][:1]
            for score in [str(completion["scores"])]
        ]
        columns: list[str | int] = ["id", "prompt", "answer", "completion", "scores", "finish_reason"]
        self._run.log({"samples": wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})

    def close(self) -> None:
        import wandb

        self._run.finish(exit_code=1 if sys.exception() else 0)
        wandb.teardown()  # `finish` returns before the file is complete
