"""Every port that the stack's processes listen on, with its protection against other users of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from deployments.stack.processes import processes_of
from deployments.stack.settings import Stack

CERTIFICATE = "client certificate"
TOKEN = "token"  # noqa: S105 (a word of the table)
METRICS = "nothing: counters of Ray, read only"
JOB = "nothing, where ranks or engines of a job meet; token, where it is Ray's own"

# By the names of ports.json; another port is known by its process.
_PROTECTION: Mapping[str, str] = {
    "s3": "signed requests",
    "ray": TOKEN,
    "ray_dashboard": TOKEN,
    "ray_agent": TOKEN,
    "ray_client": TOKEN,
    "prefect": "password (the pages of its UI and /api/health are open)",
}
# Processes of which Ray opens every port; those of a job open ports of their own beside Ray's.
_RAY = (
    "gcs_server",
    "raylet",
    "monitor.py",
    "dashboard.py",
    "ray-dashboard-",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
)


@dataclass(frozen=True, slots=True)
class ListeningPort:
    port: int
    address: str
    process: str
    name: str  # in ports.json; empty if the process has chosen it itself
    protection: str


def listening_ports(stack: Stack, session: int) -> list[ListeningPort]:
    """Return the ports of the running stack, by number. session: the pid of its supervisord."""
    members = {process.pid: process for process in processes_of(stack.folder, sessions=[session])}
    names = {port: name for name, port in stack.ports.items()}
    processes_by_address = {
        (connection.laddr.port, connection.laddr.ip): _label(members[connection.pid])
        for connection in psutil.net_connections("tcp")
        if connection.pid in members and connection.status == psutil.CONN_LISTEN
    }
    return [
        ListeningPort(
            port, address, process, names.get(port, ""), _protection(stack, port, names.get(port, ""), process)
        )
        for (port, address), process in sorted(processes_by_address.items())
    ]


def _label(process: psutil.Process) -> str:
    """Return the process's name; for Python, that of the module or script that it runs."""
    name: str = process.name()
    command: list[str] = process.cmdline()
    if not name.startswith("python"):
        return name
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return next((Path(part).name for part in command if part.endswith(".py")), name)


def _protection(stack: Stack, port: int, name: str, process: str) -> str:
    if name:
        return _PROTECTION.get(name, CERTIFICATE)
    if process == "flows.worker":
        return "secret of each flow's process"
    if not process.startswith(_RAY):
        return JOB
    return METRICS if _is_metrics(port) else TOKEN


def _is_metrics(port: int) -> bool:
    """Return whether a Ray process serves its counters there, in the format of Prometheus, which has no credentials."""
    import httpx

    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and answer.text.startswith("# HELP")
