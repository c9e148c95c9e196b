"""Fixtures: a real Ray head and a real Prefect server on loopback, one of each per test session."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker

from rlhf_core.warm.client import SOCKET_VARIABLE
from tests.services import LOOPBACK, free_ports

ROOT = Path(__file__).resolve().parents[1]


@cache
def _temporary() -> str:
    """What services leave when they end, sockets and folders of libraries, goes with this process."""
    folder = tempfile.mkdtemp(prefix="tests-")  # short, as a socket's path must be
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def service_environment(**more: str) -> dict[str, str]:
    """A job's `python` is this one, and finds the repository."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "TMPDIR": _temporary(),
        **more,
    }


class Service:
    """A process and all that it started, ended together."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str], cwd: Path = ROOT):
        self._log, self.command, self.environment = log, command, environment
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=dict(environment), cwd=cwd,
                start_new_session=True,
            )  # fmt: skip

    def wait_for(self, url: str, seconds: float = 150.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                httpx.get(url, timeout=5).raise_for_status()
                return
            except httpx.HTTPError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.end()
                    pytest.fail(f"{url} does not answer; the end of the log:\n{self._log.read_text()[-2000:]}")
                time.sleep(0.2)

    def end(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is not None:
            return
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(with_signal)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
        _, alive = psutil.wait_procs(family, timeout=5)
        for process in alive:
            process.kill()


def start_ray(log: Path, folder: Path, cpus: int = 4, **more: str) -> tuple[Service, str]:
    """A head with `cpus` logical CPUs; its dashboard's address. folder: short, since sockets lie in it."""
    port, dashboard, agent, client = free_ports(4)
    command = [
        "ray", "start", "--head", "--block", "--disable-usage-stats", f"--node-ip-address={LOOPBACK}",
        f"--port={port}", f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}", f"--num-cpus={cpus}",
        f"--object-store-memory={128 * 1024**2}", f"--temp-dir={folder}",
    ]  # fmt: skip
    command[0] = str(Path(sys.executable).parent / "ray")
    # The switch makes Ray listen on loopback alone, see deployments/stack/services.py.
    service = Service(
        command,
        log,
        service_environment(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE="1", **more),
    )
    address = f"http://{LOOPBACK}:{dashboard}"
    service.wait_for(f"{address}/api/jobs/")
    service.wait_for(f"http://{LOOPBACK}:{agent}/api/local_raylet_healthz")
    return service, address


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[Path]:
    """Where the head of `ray_address` keeps its logs."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def warm_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a warm process, as in the local stack: loading torch takes a job longer than its work."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))  # short, as a socket's path must be
    socket = folder / "warm.sock"
    log = tmp_path_factory.mktemp("warm") / "warm.log"
    command = [sys.executable, "-m", "rlhf_core.warm.server", str(socket)]
    service = Service(command, log, service_environment())
    yield socket
    service.end()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory, ray_folder: Path, warm_socket: Path) -> Iterator[str]:
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    service, address = start_ray(log, ray_folder, **{SOCKET_VARIABLE: str(warm_socket)})
    yield address
    service.end()


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with an empty database of its own."""
    folder = tmp_path_factory.mktemp("prefect")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "deployments.stack.prefect_server", "--host", LOOPBACK, "--port", str(port)]
    service = Service(
        command, folder / "prefect.log",
        service_environment(PREFECT_HOME=str(folder), PREFECT_SERVER_ANALYTICS_ENABLED="false"),
    )  # fmt: skip
    address = f"http://{LOOPBACK}:{port}/api"
    service.wait_for(f"{address}/health")
    yield address
    # What flows in this process have not sent yet: without a server each would be retried for a minute at the exit.
    APILogWorker.drain_all(timeout=10)
    EventsWorker.drain_all(timeout=10)
    service.end()
