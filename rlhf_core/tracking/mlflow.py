"""The tracker MLflow, by its REST API (`api/2.0/mlflow`), so that nodes need no package of it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.flat import flattened
from rlhf_core.config.tracking import MLflowConfig
from rlhf_core.tracking.http_sink import HttpSink, Line
from rlhf_core.tracking.sink import About

# Of MLflow: tags of a run, most parameters or metrics of a request, longest value, and signs of a metric's name.
_COMPUTATION, _LINES = "alignment_computation", "alignment_lines"
_AT_ONCE = 100
_LONGEST_VALUE = 6000
_NO_SIGN = re.compile(r"[^\w.\-/ ]", re.ASCII)


class MLflow(HttpSink):
    """Credentials: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    label = "MLflow"
    variable = "MLFLOW_TRACKING_URI"

    def __init__(self, uri: str, experiment: str, about: About):
        self._experiment, self._about = experiment, about
        self._run_id = ""
        super().__init__(f"{uri}/api/2.0/mlflow/", auth=_password(), headers=_token())

    @classmethod
    def of(cls, config: MLflowConfig, folder: Path, about: About) -> MLflow:
        return cls(cls.url(config.type), config.experiment, about)

    def start(self) -> int:
        experiment = self._experiment_id()
        wanted = {
            "experiment_ids": [experiment],
            "filter": f"tags.{_COMPUTATION} = '{self._about.computation}'",
            "max_results": 1,
        }
        found = self._post("runs/search", wanted).get("runs", [])
        run = found[0] if found else self._new_run(experiment)
        self._run_id = run["info"]["run_id"]
        arrived = int({tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}.get(_LINES, 0))
        if arrived:
            self._post("runs/update", {"run_id": self._run_id, "status": "RUNNING"})
            return arrived
        settings = [
            {"key": _NO_SIGN.sub("_", path), "value": str(value)[:_LONGEST_VALUE]}
            for path, value in flattened(self._about.config)
        ]
        for first in range(0, len(settings), _AT_ONCE):
            self._post("runs/log-batch", {"run_id": self._run_id, "params": settings[first : first + _AT_ONCE]})
        return 0

    def send(self, line: Line) -> None:
        values = [
            {
                "key": _NO_SIGN.sub("_", name),
                "value": value,
                "timestamp": int(line.unix_time * 1000),
                "step": line.step,
            }
            for name, value in line.metrics.items()
        ]
        # The number arrives with the metrics, so that a line arrives once.
        tags = [{"key": _LINES, "value": str(line.number)}]
        self._post("runs/log-batch", {"run_id": self._run_id, "metrics": values, "tags": tags})

    def end(self, status: str) -> None:
        self._post("runs/update", {"run_id": self._run_id, "status": status, "end_time": int(time.time() * 1000)})

    def _new_run(self, experiment: str) -> dict[str, Any]:
        about = self._about
        tags = {_COMPUTATION: about.computation, "alignment_key": about.key, "alignment_run": about.run_id}
        start = {
            "experiment_id": experiment,
            "run_name": about.name,
            "start_time": int(time.time() * 1000),
            "tags": [{"key": key, "value": value} for key, value in tags.items() if value],
        }
        run: dict[str, Any] = self._post("runs/create", start)["run"]
        return run

    def _experiment_id(self) -> str:
        answer = self.client.get("experiments/get-by-name", params={"experiment_name": self._experiment})
        if answer.status_code == 404:
            made = self.client.post("experiments/create", json={"name": self._experiment})
            if made.status_code == 200:
                return str(made.json()["experiment_id"])
            # Another job has made it meanwhile.
            answer = self.client.get("experiments/get-by-name", params={"experiment_name": self._experiment})
        return str(self.content(answer)["experiment"]["experiment_id"])

    def _post(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        return self.content(self.client.post(path, json=message))


def _password() -> tuple[str, str] | None:
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    return (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None


def _token() -> dict[str, str]:
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}
