"""Services of the stack: command, address and health check of each."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from deployments.stack.certificate import seaweedfs_variables
from deployments.stack.environment import BUCKET, python_path
from deployments.stack.settings import LOOPBACK, Stack
from rlhf_core.system.variables import value_of
from rlhf_core.warm.client import SOCKET_VARIABLE

WORK_POOL = "alignment"
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Service:
    """A service. `check` returns if it works, and raises (OSError, httpx.HTTPError …) if it does not."""

    name: str
    command: tuple[str, ...]
    url: str
    check: Callable[[], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_leftovers: bool = (
        True  # at start, end leftovers of a killed predecessor; not the worker's, because flow runs may outlive it
    )
    stops_group: bool = True  # SIGTERM to the process group; not Ray's, whose head hangs if its children receive it


def services(stack: Stack) -> list[Service]:
    """Return the services of this stack in the order in which they start."""
    owned = []
    if "s3" in stack.owned:
        owned.append(_s3(stack))
    if "ray" in stack.owned:
        if _starts_warm():
            owned.append(_warm(stack))
        owned.append(_ray(stack))
    if "prefect" in stack.owned:
        owned.append(_prefect_server(stack))
    owned.append(_prefect_worker(stack))
    return owned


def _program(name: str) -> str:
    """Return the path of a program of this Python environment."""
    return str(Path(sys.executable).parent / name)


def _s3(stack: Stack) -> Service:
    flags = {f"{name}.port": f"s3_{name}" for name in ("master", "volume", "filer", "admin")} | {"s3.port": "s3"}
    ports = [f"-{flag}={stack.ports[port]}" for flag, port in flags.items()]
    ports += [f"-{flag}.grpc={stack.ports[f'{port}_grpc']}" for flag, port in flags.items()]
    command = (
        _program("weed"),
        f"-logdir={stack.folder / 'logs'}",
        "mini",
        f"-dir={stack.folder / 's3'}",
        f"-ip={LOOPBACK}",  # else it listens on every address
        f"-ip.bind={LOOPBACK}",
        *ports,
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.localSocket={stack.link / 's3.sock'}",
        f"-filer.localSocket={stack.link / 'filer.sock'}",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
    )
    environment = seaweedfs_variables(certificate_folder(stack))
    return Service("s3", command, stack.url("s3"), lambda: _check_s3(stack), environment)


def certificate_folder(stack: Stack) -> Path:
    return stack.folder / "tls"


def _check_s3(stack: Stack) -> None:
    """Send signed requests, which check the credentials too; create the bucket."""
    import s3fs  # imported here: it takes a second, and only `up` and `status` need it

    filesystem = s3fs.S3FileSystem(
        endpoint_url=stack.url("s3"),
        key=stack.access_key,
        secret=stack.secret_key,
        skip_instance_cache=True,
        config_kwargs={"retries": {"max_attempts": 1}, "connect_timeout": 5, "read_timeout": 10},
    )
    if BUCKET not in [name.rstrip("/") for name in filesystem.ls("", detail=False, refresh=True)]:
        filesystem.mkdir(BUCKET)


def _ray(stack: Stack) -> Service:
    ports = stack.ports
    command = (
        _program("ray"),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        f"--node-ip-address={LOOPBACK}",
        f"--port={ports['ray']}",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={ports['ray_dashboard']}",
        f"--dashboard-agent-listen-port={ports['ray_agent']}",
        f"--ray-client-server-port={ports['ray_client']}",
        # One more than there are: for a job that computes in its own process, so that it waits for no training.
        f"--num-cpus={value_of('ALIGNMENT_RAY_CPUS') or len(os.sched_getaffinity(0)) + 1}",
        f"--object-store-memory={_object_store_memory()}",
        f"--temp-dir={stack.link / 'ray'}",
        "--log-style=record",
        "--log-color=false",
    )
    # Ray replaces a loopback address by the machine's own and then listens on all addresses, unless it assumes that
    # the cluster has one node. This switch makes it assume that, on Linux too.
    environment = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"}
    environment |= _warm_socket(stack)
    return Service(
        "ray", command, stack.url("ray_dashboard"), lambda: _check_ray(stack), environment, stops_group=False
    )


def _warm_socket(stack: Stack) -> dict[str, str]:
    """Return the variable of Ray's nodes, and of submitters of jobs to them."""
    return {SOCKET_VARIABLE: str(stack.link / "warm.sock")} if "ray" in stack.owned and _starts_warm() else {}


def _starts_warm() -> bool:
    """Return False with GPUs: a fork cannot use a GPU that its parent has initialised, and imports may do so."""
    return value_of("ALIGNMENT_WARM") != "0" and not list(Path("/dev").glob("nvidia[0-9]*"))


def _warm(stack: Stack) -> Service:
    """Return the warm process. It is not waited for: until its imports are done, jobs start as fresh processes."""
    command = (sys.executable, "-m", "rlhf_core.warm.server", str(stack.link / "warm.sock"))
    # Its forks, the jobs, end with it: no reason to look for them at its start.
    return Service("warm", command, "", lambda: _check_warm(stack), ends_leftovers=False)


def _check_warm(stack: Stack) -> None:
    path = stack.link / "warm.sock"
    if path.exists():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))


def _object_store_memory() -> int:
    """Return bytes: a sixteenth of the memory, but at most 80 % of the free shared memory."""
    size = max(int(psutil.virtual_memory().total) // 16, 512 * MIB)
    shared = Path("/dev/shm")  # noqa: S108 (where Ray stores its objects)
    if shared.is_dir():
        size = min(size, int(shutil.disk_usage(shared).free * 0.8))
    return max(size, 80 * MIB) // MIB * MIB


def _check_ray(stack: Stack) -> None:
    """Check that the Jobs API and the node's agent, which starts the jobs, both respond."""
    for url in (f"{stack.url('ray_dashboard')}/api/jobs/", f"{stack.url('ray_agent')}/api/local_raylet_healthz"):
        _get(url, {"Authorization": f"Bearer {stack.ray_token}"})


def _prefect_server(stack: Stack) -> Service:
    address = ("--host", LOOPBACK, "--port", str(stack.ports["prefect"]))
    command = (sys.executable, "-m", "deployments.stack.prefect_server", *address)
    return Service("prefect", command, stack.url("prefect"), lambda: _get(stack.url("prefect") + "/api/health"))


def _prefect_worker(stack: Stack) -> Service:
    name = f"local-{stack.link.name.removeprefix('alignment-')}"
    command = (sys.executable, "-m", "flows.worker", "--pool", WORK_POOL, "--name", name)
    environment = {"PREFECT_WORKER_QUERY_SECONDS": "2", **_warm_socket(stack)}
    return Service("worker", command, "", lambda: _check_worker(stack, name), environment, ends_leftovers=False)


def _check_worker(stack: Stack, name: str) -> None:
    api = stack.environment().get("PREFECT_API_URL") or os.environ["PREFECT_API_URL"]
    headers = api_headers({**os.environ, **stack.environment()})
    answer = httpx.post(f"{api}/work_pools/{WORK_POOL}/workers/filter", json={}, timeout=10, headers=headers)
    answer.raise_for_status()
    if not any(worker["name"] == name and worker["status"] == "ONLINE" for worker in answer.json()):
        raise OSError(f"no worker polls the work pool `{WORK_POOL}`")


def api_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of requests to Prefect's API, from its client's variables."""
    if login := environment.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {b64encode(login.encode()).decode()}"}
    key = environment.get("PREFECT_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _get(url: str, headers: Mapping[str, str] | None = None) -> None:
    httpx.get(url, timeout=10, headers=headers).raise_for_status()


def service_environment(stack: Stack, service: Service) -> dict[str, str]:
    """Return the variables of a service in addition to supervisord's environment."""
    return {
        "ALIGNMENT_STACK_SERVICE": f"{stack.folder}:{service.name}",  # how `down` knows the processes of this stack
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",  # a job's `python` is ours
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(stack.temporary),
        **service.environment,
    }
