"""Documents of the commands that set up: the local stack and its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    state: str
    problem: str
    works: bool
    pid: int
    uptime: float
    url: str
    log: Path | None


@dataclass(frozen=True, slots=True)
class Port:
    address: str
    port: int
    used_by: str
    protected_by: str


@dataclass(frozen=True, slots=True)
class StackStatus:
    services: Sequence[Service]
    ports: Sequence[Port]


@dataclass(frozen=True, slots=True)
class Environment:
    variables: Mapping[str, str]
