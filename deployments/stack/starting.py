"""Start of the stack's services, with a wait until each works."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from deployments.stack.services import Service
from deployments.stack.settings import Stack
from deployments.stack.supervision import Supervisor
from rlhf_core.errors import StackError
from rlhf_core.system.variables import value_of

_LAST_LINES = 5


def await_all(stack: Stack, supervisor: Supervisor, all_services: list[Service], report: Callable[[str], None]) -> None:
    """Start all stopped services, the worker last because it needs the server; wait until each one works."""
    states = supervisor.states()
    for service in all_services:
        if service.name != "worker":
            _start_if_stopped(supervisor, service, states[service.name].state)
    for service in all_services:
        if service.name == "worker":
            _start_if_stopped(supervisor, service, states[service.name].state)
        _await(stack, supervisor, service)
        report(f"{service.name} works{f': {service.url}' if service.url else ''}")


def _start_if_stopped(supervisor: Supervisor, service: Service, state: str) -> None:
    if state in ("STOPPED", "EXITED", "FATAL"):
        supervisor.start_service(service.name)


def _await(stack: Stack, supervisor: Supervisor, service: Service) -> None:
    deadline = time.monotonic() + timeout()
    while problem := problem_of(service):
        fatal = supervisor.states()[service.name].state == "FATAL"
        if fatal or time.monotonic() > deadline:
            how = "fails repeatedly" if fatal else f"does not work after {timeout():.0f} s ({problem})"
            log = stack.log(service.name)
            raise StackError("\n  ".join([f"{service.name} {how}:", *_last_lines(log), f"full log: {log}"]))
        time.sleep(0.3)


def problem_of(service: Service) -> str:
    """Return why the service does not work, in one line; empty if it works."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        service.check()
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL, BotoCoreError, ClientError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return ""


def _last_lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:] or ["(the log is empty)"]


def timeout() -> float:
    """Return the limit for the start or stop of a service, in seconds. Raises VariableError."""
    return float(value_of("ALIGNMENT_STACK_TIMEOUT") or 180)
