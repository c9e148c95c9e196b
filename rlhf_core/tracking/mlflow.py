"""The tracker MLflow, by its REST API (`api/2.0/mlflow`), so that nodes need no package of it."""

from __future__ import annotations

import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rlhf_core.config.flat import flattened
from rlhf_core.config.texts import names_a_host
from rlhf_core.config.tracking import MLflowConfig
from rlhf_core.errors import StageError, reason_of
from rlhf_core.system.stopping import STOPS
from rlhf_core.tracking.sink import About

URI_VARIABLE = "MLFLOW_TRACKING_URI"

_REQUEST_SECONDS = 10.0
_LONGEST_PAUSE = 30.0  # seconds between two attempts
_CLOSE_SECONDS = 30.0  # that the end of a stage waits for lines that are not sent yet
_STOP_SECONDS = 2.0  # of one that was stopped, and is killed soon
# Of MLflow: tags of a run, most parameters or metrics of a request, longest value, and signs of a metric's name.
_COMPUTATION, _LINES = "alignment_computation", "alignment_lines"
_AT_ONCE = 100
_LONGEST_VALUE = 6000
_NO_SIGN = re.compile(r"[^\w.\-/ ]", re.ASCII)

T = TypeVar("T")
_Line = tuple[int, float, Mapping[str, float]]


class MLflow:
    """Sends lines from a thread, in order. A server that cannot be reached is asked again and again, and neither slows
    the training nor ends it; lines that have not arrived 30 seconds after the last are in metrics.jsonl alone.

    Credentials: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """

    def __init__(self, uri: str, experiment: str, about: About):
        self._client = httpx.Client(
            base_url=f"{uri.rstrip('/')}/api/2.0/mlflow/", timeout=_REQUEST_SECONDS, auth=_password(), headers=_token()
        )
        self._experiment, self._about = experiment, about
        self._waiting: queue.Queue[_Line | str] = queue.Queue()
        self._given_up = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._send_all, name="MLflow", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: MLflowConfig, folder: Path, about: About) -> MLflow:
        """Raises StageError without a URL in MLFLOW_TRACKING_URI."""
        uri = os.environ.get(URI_VARIABLE, "")
        if not uri.startswith(("http://", "https://")) or not names_a_host(uri):
            raise StageError(
                f"the tracker `mlflow` needs a server: set {URI_VARIABLE} to its http(s) URL where the flow runs, or "
                "remove it from `tracking.others`"
            )
        return cls(uri, config.experiment, about)

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        self._waiting.put((step, unix_time, dict(metrics)))

    def close(self) -> None:
        stopped = STOPS.requested is not None
        self._waiting.put("KILLED" if stopped else "FAILED" if sys.exception() else "FINISHED")
        self._thread.join(timeout=_STOP_SECONDS if stopped else _CLOSE_SECONDS)
        if self._thread.is_alive():
            self._given_up.set()
            print("MLflow: the last lines have not arrived; they are in metrics.jsonl", flush=True)
        else:
            self._client.close()

    def _send_all(self) -> None:
        try:
            run_id, arrived, sent = "", 0, 0
            while not isinstance(line := self._waiting.get(), str):
                if not run_id:
                    run_id, arrived = self._until_answered(self._find_or_start)
                sent += 1
                if sent > arrived:
                    self._until_answered(partial(self._send, run_id, line, sent))
            if run_id:
                end = {"run_id": run_id, "status": line, "end_time": int(time.time() * 1000)}
                self._until_answered(lambda: self._post("runs/update", end))
        except (_RefusedError, LookupError, httpx.HTTPError) as refusal:
            if not self._given_up.is_set():
                print(f"MLflow gets no more of this job's metrics: {reason_of(refusal)}", flush=True)

    def _until_answered(self, request: Callable[[], T]) -> T:
        pause = 0.5
        while not self._given_up.is_set():
            try:
                return request()
            except httpx.TransportError as error:
                if not self._complained:
                    self._complained = True
                    print(f"MLflow cannot be reached ({reason_of(error)}); it is asked again and again", flush=True)
            self._given_up.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise _RefusedError("the stage has ended")

    def _find_or_start(self) -> tuple[str, int]:
        """Return the id of this computation's run, and how many of its lines have arrived."""
        experiment = self._experiment_id()
        wanted = {
            "experiment_ids": [experiment],
            "filter": f"tags.{_COMPUTATION} = '{self._about.computation}'",
            "max_results": 1,
        }
        found = self._post("runs/search", wanted).get("runs", [])
        run = found[0] if found else self._start(experiment)
        run_id: str = run["info"]["run_id"]
        arrived = int({tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}.get(_LINES, 0))
        if arrived:
            self._post("runs/update", {"run_id": run_id, "status": "RUNNING"})
            return run_id, arrived
        settings = [
            {"key": _NO_SIGN.sub("_", path), "value": str(value)[:_LONGEST_VALUE]}
            for path, value in flattened(self._about.config)
        ]
        for first in range(0, len(settings), _AT_ONCE):
            self._post("runs/log-batch", {"run_id": run_id, "params": settings[first : first + _AT_ONCE]})
        return run_id, 0

    def _start(self, experiment: str) -> dict[str, Any]:
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
        answer = self._client.get("experiments/get-by-name", params={"experiment_name": self._experiment})
        if answer.status_code == 404:
            made = self._client.post("experiments/create", json={"name": self._experiment})
            if made.status_code == 200:
                return str(made.json()["experiment_id"])
            # Another job has made it meanwhile.
            answer = self._client.get("experiments/get-by-name", params={"experiment_name": self._experiment})
        return str(_content(answer)["experiment"]["experiment_id"])

    def _send(self, run_id: str, line: _Line, number: int) -> None:
        """number: of the line, from 1. It arrives with the metrics, so that a line arrives once."""
        step, unix_time, metrics = line
        milliseconds = int(unix_time * 1000)
        values = [
            {
                "key": _NO_SIGN.sub("_", name),
                "value": value if math.isfinite(value) else "NaN",
                "timestamp": milliseconds,
                "step": step,
            }
            for name, value in metrics.items()
        ]
        tags = [{"key": _LINES, "value": str(number)}]
        self._post("runs/log-batch", {"run_id": run_id, "metrics": values, "tags": tags})

    def _post(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        return _content(self._client.post(path, json=message))


class _RefusedError(Exception):
    """The server does not take these metrics, and would not if asked again."""


def _content(answer: httpx.Response) -> dict[str, Any]:
    """Raises TransportError where asking again may help, else _RefusedError."""
    if answer.status_code == 429 or answer.status_code >= 500:
        raise httpx.TransportError(f"status code {answer.status_code}")
    try:
        content = answer.json()
    except ValueError:
        content = {}
    if answer.status_code != 200 or not isinstance(content, dict):
        message = content.get("message") if isinstance(content, dict) else None
        raise _RefusedError(
            f"status code {answer.status_code}: {message or f'is {URI_VARIABLE} the URL of its server?'}"
        )
    return content


def _password() -> tuple[str, str] | None:
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    return (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None


def _token() -> dict[str, str]:
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}
