"""The tracker SwanLab, by its package `swanlab`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.tracking import SwanLabConfig
from rlhf_core.errors import StageError, reason_of
from rlhf_core.system.stopping import STOPS
from rlhf_core.tracking.sink import About


class SwanLab:
    """Online if there is a key in SWANLAB_API_KEY, else offline: `swanlab sync` uploads the artifact's folder later.

    A run that is continued gets all lines again. The package drops those that its server has, by metric and step.
    """

    def __init__(self, config: SwanLabConfig, folder: Path, about: About):
        try:
            import swanlab
            from swanlab.exceptions import AuthenticationError
        except ModuleNotFoundError as error:
            raise StageError("the tracker `swanlab` needs its package where jobs run: pip install swanlab") from error

        # No prompts, and nothing of the machine or its terminal leaves it.
        settings = swanlab.Settings(
            interactive=False,
            terminal={"proxy_type": "none"},
            probe=dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False),
        )
        start: dict[str, Any] = {
            "project": config.project, "workspace": config.workspace, "name": about.name, "group": about.run_id or None,
            "tags": [about.key[:12]], "config": dict(about.config), "id": about.computation, "log_dir": str(folder),
            "settings": settings, "reinit": True,
        }  # fmt: skip
        mode = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
        try:
            self._run = swanlab.init(**start, mode=mode, resume="allow")
        except (OSError, RuntimeError, AuthenticationError) as error:
            # An unreachable tracker must not end the training.
            print(f"SwanLab cannot be reached, this run is logged offline: {reason_of(error)}", flush=True)
            self._run = swanlab.init(**start, mode="offline")

    @classmethod
    def of(cls, config: SwanLabConfig, folder: Path, about: About) -> SwanLab:
        return cls(config, folder, about)

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        state = "aborted" if STOPS.requested is not None else "crashed" if sys.exception() else "success"
        self._run.finish(state=state, error="the stage failed" if state == "crashed" else None)
