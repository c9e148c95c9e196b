"""supervisord: its configuration, start, and control through a Unix socket."""

from __future__ import annotations

import os
import subprocess
import sys
import xmlrpc.client
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
from supervisor.xmlrpc import SupervisorTransport

from deployments.stack.environment import HOME, IS_INSTALLED
from deployments.stack.files import read_pid, read_text
from deployments.stack.services import Service, service_environment
from deployments.stack.settings import Stack, write_private
from rlhf_core.errors import StackError

_SUPERVISORD = """\
[supervisord]
pidfile={folder}/supervisord.pid
logfile={folder}/logs/supervisord.log
logfile_maxbytes=1MB
logfile_backups=1
childlogdir={folder}/logs
directory={working_folder}

[unix_http_server]
file={link}/supervisor.sock
chmod=0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""
_PROGRAM = """
[program:{name}]
command={command}
environment={environment}
directory={working_folder}
priority={priority}
autostart=false
autorestart=true
startsecs=10
startretries=3
stopasgroup={stops_group}
killasgroup=true
stopwaitsecs=15
redirect_stderr=true
stdout_logfile={log}
stdout_logfile_maxbytes=10MB
stdout_logfile_backups=1
"""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """supervisord's state: RUNNING, STARTING, BACKOFF, FATAL, EXITED or STOPPED; `pid` is 0 if there is no process."""

    state: str
    pid: int
    since: float  # seconds since the epoch


class Supervisor:
    """The supervisord of one stack, whether it is running or not."""

    def __init__(self, folder: Path, link: Path) -> None:
        self._folder = folder
        self._socket = link / "supervisor.sock"

    def pid(self) -> int | None:
        """Return the pid of the running supervisord of this folder; None if there is none."""
        recorded = self.recorded_pid()
        if recorded is None:
            return None
        try:
            command = psutil.Process(recorded).cmdline()
        except psutil.NoSuchProcess:
            return None
        return recorded if str(self._config) in command else None

    def recorded_pid(self) -> int | None:
        """Return the pid of the folder's last supervisord, running or not.

        It is the session id of all that it started.
        """
        return read_pid(
            self._folder / "supervisord.pid",
            f"write the number there that `pgrep -f {self._config}` prints, or remove the file if that prints none",
        )

    def start(self, config: str, environment: Mapping[str, str]) -> None:
        """Write the configuration and start supervisord with `environment`, which its services inherit."""
        write_private(self._config, config)
        command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(self._config)]
        done = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
            raise StackError(f"supervisord did not start: {last[0]}")

    def running_config(self) -> str:
        return read_text(self._config)

    def states(self) -> dict[str, ProcessState]:
        processes = cast(list[dict[str, Any]], self._call("getAllProcessInfo"))
        return {entry["name"]: ProcessState(entry["statename"], entry["pid"], entry["start"]) for entry in processes}

    def start_service(self, name: str) -> None:
        self._call("startProcess", name, False)  # False: do not wait here; the health check waits

    def shutdown(self) -> None:
        self._call("shutdown")

    @property
    def _config(self) -> Path:
        return self._folder / "supervisord.conf"

    def _call(self, method: str, *arguments: object) -> object:
        transport = SupervisorTransport("", "", f"unix://{self._socket}")
        try:
            proxy = xmlrpc.client.ServerProxy("http://localhost", transport=transport)
            return getattr(proxy.supervisor, method)(*arguments)
        except (OSError, xmlrpc.client.Error) as error:
            raise StackError(f"supervisord does not answer ({method}): {error}") from error
        finally:
            transport.close()


def configuration(stack: Stack, services: list[Service]) -> str:
    """Return the text of supervisord.conf, without secrets, which supervisord gets in its environment."""
    # Not site-packages: `python -m` puts its folder before the standard library, and the warm process takes it away.
    working_folder = stack.folder if IS_INSTALLED else HOME
    text = _SUPERVISORD.format(
        folder=_escape(stack.folder), link=_escape(stack.link), working_folder=_escape(working_folder)
    )
    for priority, service in enumerate(services):
        launch = [sys.executable, "-m", "deployments.stack.launch"]
        launch += [] if service.ends_leftovers else ["--keep-leftovers"]
        text += _PROGRAM.format(
            name=service.name,
            command=" ".join(_quote(part) for part in (*launch, *service.command)),
            environment=",".join(f"{k}={_quote(v)}" for k, v in service_environment(stack, service).items()),
            working_folder=_escape(working_folder),
            priority=priority,
            stops_group=str(service.stops_group).lower(),
            log=_escape(stack.log(service.name)),
        )
    return text


def _escape(value: object) -> str:
    return str(value).replace("%", "%%")


def _quote(value: str) -> str:
    if '"' in value or "\n" in value:
        raise StackError(f"supervisord's configuration cannot contain a double quote or a line break: {value!r}")
    return f'"{_escape(value)}"' if value else '""'


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without the marker of another stack's service."""
    return {name: value for name, value in os.environ.items() if name != "ALIGNMENT_STACK_SERVICE"}
