"""The tracker trackio, by its HTTP API (version 1), so that nodes need no package of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlhf_core.config.tracking import TrackioConfig
from rlhf_core.tracking.http_sink import HttpSink, Line
from rlhf_core.tracking.sink import About


class Trackio(HttpSink):
    """Credentials: TRACKIO_WRITE_TOKEN."""

    label = "trackio"
    variable = "TRACKIO_SERVER_URL"

    def __init__(self, url: str, project: str, about: About):
        self._run = {"project": project, "run": about.name, "run_id": about.computation}
        # Its pages group runs by `_Group`.
        self._config = {**about.config, "key": about.key, "_Group": about.run_id or None}
        super().__init__(f"{url}/api/", headers={"X-Trackio-Write-Token": os.environ.get("TRACKIO_WRITE_TOKEN", "")})

    @classmethod
    def of(cls, config: TrackioConfig, folder: Path, about: About) -> Trackio:
        return cls(cls.url(config.type), config.project, about)

    def start(self) -> int:
        return int(self._call("get_run_summary", **self._run)["num_logs"])

    def send(self, line: Line) -> None:
        # The server drops an entry whose id it has, so that one whose answer was lost is not there twice.
        entry: dict[str, Any] = {
            **self._run, "step": line.step, "log_id": f"{self._run['run_id']}-{line.number}",
            "metrics": line.metrics,
        }  # fmt: skip
        if line.number == 1:
            entry["config"] = self._config
        self._call("bulk_log", logs=[entry], hf_token=None)

    def end(self, status: str) -> None: ...  # its runs have none

    def _call(self, function: str, **arguments: Any) -> Any:
        return self.content(self.client.post(function, json={"args": [], "kwargs": arguments}))["data"]
