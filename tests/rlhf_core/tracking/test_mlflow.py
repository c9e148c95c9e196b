"""Metrics at an MLflow server: a stand-in of its REST API, which can be away; docs/operate/tracking.md: a real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rlhf_core.config.tracking import MLflowConfig, TrackingConfig
from rlhf_core.errors import StageError
from rlhf_core.system.stopping import STOPS, Stop
from rlhf_core.tracking.tracker import Tracker
from tests.services import http_server

pytestmark = pytest.mark.parts

USER, PASSWORD = "someone", "hidden-word"


class Server:
    """What MLflow 3.17 keeps and answers, of the requests that the tracker makes."""

    def __init__(self) -> None:
        self.url = ""
        self.experiments: list[str] = []
        self.runs: list[dict[str, Any]] = []
        self.failures: list[int] = []  # status codes of the next answers
        self.stuck = threading.Event()
        self.answers_at_all = True
        self.headers: list[str | None] = []

    def answer(self, path: str, message: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match path.rpartition("mlflow/")[2]:
            case "experiments/get-by-name" if message["experiment_name"] in self.experiments:
                return 200, {"experiment": {"experiment_id": str(self.experiments.index(message["experiment_name"]))}}
            case "experiments/get-by-name":
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
            case "experiments/create":
                self.experiments.append(message["name"])
                return 200, {"experiment_id": str(len(self.experiments) - 1)}
            case "runs/search":
                name, value = message["filter"].removeprefix("tags.").split(" = ")
                return 200, {
                    "runs": [self._shown(run) for run in self.runs if run["tags"].get(name) == value.strip("'")]
                }
            case "runs/create":
                run = {"id": f"r{len(self.runs)}", "name": message["run_name"], "metrics": [], "params": {},
                       "tags": {tag["key"]: tag["value"] for tag in message["tags"]}, "status": "RUNNING"}  # fmt: skip
                self.runs.append(run)
                return 200, {"run": self._shown(run)}
            case "runs/log-batch":
                run = self._run(message)
                run["metrics"] += [(m["step"], m["key"], m["value"]) for m in message.get("metrics", [])]
                run["tags"] |= {tag["key"]: tag["value"] for tag in message.get("tags", [])}
                run["params"] |= {param["key"]: param["value"] for param in message.get("params", [])}
            case "runs/update":
                self._run(message)["status"] = message["status"]
            case _:
                return 404, {}
        return 200, {}

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        return next(run for run in self.runs if run["id"] == message["run_id"])

    def _shown(self, run: dict[str, Any]) -> dict[str, Any]:
        tags = [{"key": key, "value": value} for key, value in run["tags"].items()]
        return {"info": {"run_id": run["id"]}, "data": {"tags": tags}}


@contextmanager
def mlflow_server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, message: dict[str, Any]) -> None:
            server.headers.append(self.headers["Authorization"])
            if not server.answers_at_all:
                server.stuck.wait(20)
            failure = server.failures.pop(0) if server.failures else None
            status, content = server.answer(urlsplit(self.path).path, message) if failure is None else (failure, {})
            with suppress(ConnectionError):
                self.send_response(status)
                body = json.dumps(content).encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = Server()
    with http_server(Handler) as server.url:
        yield server
        server.stuck.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    with mlflow_server() as running:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", running.url)
        yield running


def tracker(folder: Path) -> Tracker:
    settings = TrackingConfig(wandb=False, tensorboard=False, others={"live": MLflowConfig(type="mlflow")})
    config = {"epochs": 1, "optimizer": {"learning_rate": 0.5}}
    return Tracker(folder, settings, name="sft", run_id="run-1", key="a" * 64, config=config)


def test_a_run_has_the_settings_the_metrics_and_its_end(tmp_path: Path, server: Server) -> None:
    with tracker(tmp_path) as logging:
        logging.log(1, {"loss": 0.5, "pass@1": float("nan")})
        logging.log(2, {"loss": 0.25})
    (run,) = server.runs
    assert (run["name"], run["status"], server.experiments) == ("sft", "FINISHED", ["alignment"])
    assert run["params"] == {"epochs": "1", "optimizer.learning_rate": "0.5"}
    assert run["metrics"] == [(1, "loss", 0.5), (1, "pass_1", "NaN"), (2, "loss", 0.25)]
    assert (run["tags"]["alignment_key"], run["tags"]["alignment_run"]) == ("a" * 64, "run-1")


def test_a_resumed_stage_continues_the_run_and_sends_no_line_again(tmp_path: Path, server: Server) -> None:
    killed = tracker(tmp_path / "killed")
    killed.log(1, {"loss": 0.5})
    killed.log(1, {"validation/loss": 0.75})
    kept = killed.logged()
    killed.log(2, {"loss": 0.25})  # after the checkpoint: computed again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STOPS, "requested", Stop("the job was stopped"))
        killed.close()
    assert server.runs[0]["status"] == "KILLED"
    with tracker(tmp_path / "resumed") as resumed:
        resumed.restore(kept)
        resumed.log(2, {"loss": 0.25})
        resumed.log(3, {"loss": 0.125})
    (run,) = server.runs
    assert run["metrics"] == [(1, "loss", 0.5), (1, "validation/loss", 0.75), (2, "loss", 0.25), (3, "loss", 0.125)]
    assert run["status"] == "FINISHED"


def test_another_computation_of_the_stage_is_another_run(tmp_path: Path, server: Server) -> None:
    for name in ("first", "again"):
        with tracker(tmp_path / name) as logging:
            logging.log(1, {"loss": 0.5})
    assert [run["metrics"] for run in server.runs] == [[(1, "loss", 0.5)]] * 2


def test_a_stage_that_fails_is_shown_as_failed(tmp_path: Path, server: Server) -> None:
    logging = tracker(tmp_path)
    logging.log(1, {"loss": 0.5})
    with pytest.raises(StageError), logging:
        raise StageError("out of memory")
    assert server.runs[0]["status"] == "FAILED"


def test_what_a_server_did_not_take_is_sent_again_in_order(tmp_path: Path, server: Server) -> None:
    server.failures = [503, 429]
    with tracker(tmp_path) as logging:
        for step in range(1, 6):
            logging.log(step, {"loss": 0.5})
    assert [step for step, _, _ in server.runs[0]["metrics"]] == [1, 2, 3, 4, 5]


def test_a_server_that_hangs_does_not_slow_the_steps_and_ends_nothing(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers_at_all = False
    monkeypatch.setattr("rlhf_core.tracking.http_sink._CLOSE_SECONDS", 0.2)
    began = time.monotonic()
    with tracker(tmp_path) as logging:
        for step in range(500):
            logging.log(step, {"loss": 0.5})
    assert time.monotonic() - began < 5  # one request waits for ten seconds
    assert "MLflow: the last lines have not arrived; they are in metrics.jsonl\n" in capsys.readouterr().out
    assert len(logging.folder.joinpath("metrics.jsonl").read_text().splitlines()) == 500


def test_a_server_that_refuses_is_named_once_and_without_the_password(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url.replace("://", f"://{USER}:{PASSWORD}@"))
    server.failures = [401]
    with tracker(tmp_path) as logging:
        for step in range(3):
            logging.log(step, {"loss": 0.5})
    out = capsys.readouterr().out
    assert out == (
        "MLflow gets no more of this job's metrics: status code 401: is MLFLOW_TRACKING_URI the URL of its server?\n"
    )
    assert server.headers[0] is not None
    assert server.headers[0].startswith("Basic ")


@pytest.mark.parametrize("value", ["", "sqlite:///mlflow.db", f"http://{USER}:{PASSWORD}@[loopback"])
def test_without_a_server_the_job_ends_in_a_sentence(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", value)
    with pytest.raises(StageError, match="MLFLOW_TRACKING_URI") as raised, tracker(tmp_path) as logging:
        logging.log(1, {"loss": 0.5})
    assert PASSWORD not in str(raised.value)


def test_a_token_is_sent_and_never_part_of_the_settings(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", PASSWORD)
    with tracker(tmp_path) as logging:
        logging.log(1, {"loss": 0.5})
    assert set(server.headers) == {f"Bearer {PASSWORD}"}
    assert PASSWORD not in json.dumps(server.runs)
