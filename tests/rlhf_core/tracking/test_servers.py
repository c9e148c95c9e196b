"""Metrics at the real servers of MLflow and trackio, and in the files of the real package of SwanLab."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import time
import venv
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlhf_core.config.tracking import MLflowConfig, TrackerConfig, TrackingConfig, TrackioConfig
from rlhf_core.system.stopping import STOPS, Stop
from rlhf_core.tracking.tracker import Tracker
from tests.services import LOOPBACK, free_ports

pytestmark = [
    pytest.mark.endurance("architectures"),
    pytest.mark.slow("installs the servers' packages from an index"),
]

PACKAGES = ("mlflow==3.17.2", "trackio==0.43.0", "swanlab==0.10.3")
CONFIG = {"epochs": 1, "optimizer": {"learning_rate": 0.5}}
TOKEN = "hidden-word"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment on top of ours, for packages that need older versions of what they share with us."""
    folder = tmp_path_factory.mktemp("trackers")
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    install = [folder / "bin/pip", "install", "--no-compile", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


class Server(ABC):
    """A tracker's server, which keeps what it got when it is stopped and started again."""

    config: TrackerConfig

    def __init__(self, site: Path, folder: Path) -> None:
        self.site, self.folder = site, folder
        (self.port,) = free_ports(1)
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def command(self) -> list[str]: ...

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]:
        """The variables of the job and of the server."""

    @abstractmethod
    def runs(self) -> list[tuple[dict[str, Any], list[tuple[int, str, float]]]]:
        """Settings and (step, metric, value) of each run, the latest run last, both in the order of their arrival."""

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.site / "bin" / self.command[0], *self.command[1:]], env=os.environ | self.environment,
                cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            return self.http.get("/version").status_code == 200
        except httpx.TransportError:
            return False


class MLflowServer(Server):
    config = MLflowConfig(type="mlflow", experiment="letters")

    @property
    def command(self) -> list[str]:
        options = f"--host {LOOPBACK} --port {self.port} --workers 1 --backend-store-uri sqlite:///mlflow.db"
        return ["mlflow", "server", *options.split()]

    @property
    def environment(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_URI": self.url, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}

    def runs(self) -> list[tuple[dict[str, Any], list[tuple[int, str, float]]]]:
        experiment = self._get("experiments/get-by-name", experiment_name="letters").get("experiment")
        if experiment is None:
            return []
        query = {"experiment_ids": [experiment["experiment_id"]], "order_by": ["start_time"]}
        answer = self.http.post("/api/2.0/mlflow/runs/search", json=query).json()
        return [
            ({param["key"]: param["value"] for param in run["data"].get("params", [])}, self._metrics(run))
            for run in answer.get("runs", [])
        ]

    def _metrics(self, run: dict[str, Any]) -> list[tuple[int, str, float]]:
        names = [metric["key"] for metric in run["data"].get("metrics", [])]
        histories = [
            self._get("metrics/get-history", run_id=run["info"]["run_id"], metric_key=name)["metrics"] for name in names
        ]
        return sorted((each["step"], each["key"], each["value"]) for history in histories for each in history)

    def _get(self, path: str, **params: str) -> dict[str, Any]:
        content: dict[str, Any] = self.http.get(f"/api/2.0/mlflow/{path}", params=params).json()
        return content


class TrackioServer(Server):
    config = TrackioConfig(type="trackio", project="letters")

    @property
    def command(self) -> list[str]:
        arguments = f"open_browser=False, block_thread=True, host='{LOOPBACK}', server_port={self.port}"
        return ["python", "-c", f"import trackio; trackio.show({arguments})"]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "TRACKIO_SERVER_URL": self.url, "TRACKIO_WRITE_TOKEN": TOKEN, "TRACKIO_DIR": str(self.folder / "trackio"),
        }  # fmt: skip

    def runs(self) -> list[tuple[dict[str, Any], list[tuple[int, str, float]]]]:
        if "letters" not in self._call("get_all_projects"):
            return []
        configs = self._call("get_run_configs", project="letters")
        return [
            (
                configs[run["id"]],
                sorted(
                    (line["step"], name, value)
                    for line in self._call("get_logs", project="letters", run=run["name"], run_id=run["id"])
                    for name, value in line.items()
                    if name not in ("step", "timestamp")
                ),
            )
            for run in sorted(self._call("get_runs_for_project", project="letters"), key=lambda run: run["created_at"])
        ]

    def _call(self, function: str, **arguments: str) -> Any:
        return self.http.post(f"/api/{function}", json={"args": [], "kwargs": arguments}).json()["data"]


@pytest.fixture(params=[MLflowServer, TrackioServer])
def server(
    request: pytest.FixtureRequest, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    running: Server = request.param(site, tmp_path)
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def tracker(folder: Path, config: TrackerConfig) -> Tracker:
    settings = TrackingConfig(wandb=False, tensorboard=False, others={"team": config})
    return Tracker(folder, settings, name="sft", run_id="run-1", key="a" * 64, config=CONFIG)


def test_a_resumed_stage_continues_its_run_and_sends_no_line_twice(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tracker(tmp_path / "killed", server.config)
    killed.log(1, {"loss": 0.5, "pass@1": float("nan")})
    killed.log(1, {"validation/loss": 0.75})
    kept = killed.logged()
    killed.log(2, {"loss": 0.25})  # after the checkpoint: computed again
    while sum(len(metrics) for _, metrics in server.runs()) < 4:
        time.sleep(0.1)
    with monkeypatch.context() as patch:
        patch.setattr(STOPS, "requested", Stop("the job was stopped"))
        killed.close()
    with tracker(tmp_path / "resumed", server.config) as resumed:
        resumed.restore(kept)
        resumed.log(2, {"loss": 0.25})
        resumed.log(3, {"loss": 0.125})
    ((settings, metrics),) = server.runs()
    finite = [each for each in metrics if "pass" not in each[1]]
    assert finite == [(1, "loss", 0.5), (1, "validation/loss", 0.75), (2, "loss", 0.25), (3, "loss", 0.125)]
    assert len(metrics) == 5
    assert settings["epochs"] in (1, "1")


def test_lines_of_the_time_in_which_a_server_was_away_arrive_once(server: Server, tmp_path: Path) -> None:
    with tracker(tmp_path / "job", server.config) as logging:
        logging.log(1, {"loss": 1.0})
        server.stop()
        for step in range(2, 6):
            logging.log(step, {"loss": 1 / step})
        server.start()
    ((_, metrics),) = server.runs()
    assert metrics == [(step, "loss", 1 / step) for step in range(1, 6)]


def test_a_wrong_token_is_named_once_and_ends_nothing(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = TrackioServer(site, tmp_path)
    server.start()
    try:
        monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "wrong")
        monkeypatch.setenv("TRACKIO_SERVER_URL", server.url)
        with tracker(tmp_path / "job", server.config) as logging:
            for step in range(3):
                logging.log(step, {"loss": 0.5})
    finally:
        server.stop()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("trackio gets no more of this job's metrics: status code 400: A write_token is required")


SWANLAB_JOB = """
import json, sys
from pathlib import Path

from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader

from rlhf_core.config.tracking import SwanLabConfig
from tests.rlhf_core.tracking.test_servers import tracker

folder = Path(sys.argv[1])
with tracker(folder, SwanLabConfig(type="swanlab", project="letters")) as logging:
    logging.log(1, {"loss": 0.5})
    logging.log(1, {"validation/loss": 0.75})
    logging.log(2, {"loss": 0.25})
kept = folder / "kept"
kept.mkdir()
logging.keep(kept)
reader = DataStoreReader()
(file,) = kept.glob("tracking/others/team/run-*/*.swanlab")
reader.open(file)
records = [Record.FromString(record) for record in reader]
print()
print(json.dumps([(r.scalar.step, r.scalar.key, r.scalar.value.number) for r in records if r.HasField("scalar")]))
"""


def test_swanlab_keeps_its_files_for_a_later_upload(site: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWANLAB_")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [site / "bin/python", "-c", SWANLAB_JOB, str(tmp_path)]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = json.loads(job.stdout.splitlines()[-1])
    assert lines == [[1, "loss", 0.5], [1, "validation/loss", 0.75], [2, "loss", 0.25]]
    assert list(tmp_path.rglob("requirements.txt")) == []  # nor anything else of the machine
