"""Documents of the commands for loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RoundLine:
    number: int
    verdict: str  # accepted, refused, skipped, running, or unfinished: started by a run that has ended
    reason: str
    candidate: str | None
    started: datetime | None
    ended: datetime | None
    run: str


@dataclass(frozen=True, slots=True)
class LoopRounds:
    loop: str
    rounds: Sequence[RoundLine]
    page: Path | None


@dataclass(frozen=True, slots=True)
class ScheduleLine:
    loop: str
    when: str
    active: bool
    recipe: str
    settings: str
    budget: float | None = None  # of the loop, in the currency of its prices


@dataclass(frozen=True, slots=True)
class Schedules:
    schedules: Sequence[ScheduleLine]
