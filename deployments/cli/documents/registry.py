"""Documents of the commands for models, aliases and their protection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class AliasLine:
    alias: str
    artifact: str
    previous: str | None
    by: str
    reason: str
    moved: datetime


@dataclass(frozen=True, slots=True)
class Aliases:
    aliases: Sequence[AliasLine]


@dataclass(frozen=True, slots=True)
class MoveLine:
    alias: str
    number: int
    artifact: str
    previous: str | None
    by: str
    reason: str
    moved: datetime
    gate: str | None  # the artifact that passed the model
    approved_by: str
    restores: int | None  # of a rollback: number of the move to whose model it goes back


@dataclass(frozen=True, slots=True)
class ProtectionLine:
    alias: str
    protected: bool
    by: str
    reason: str
    changed: datetime


@dataclass(frozen=True, slots=True)
class RegistryLog:
    waiting: Sequence[AliasLine]  # candidates that wait for a person
    moves: Sequence[MoveLine]
    protections: Sequence[ProtectionLine]


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    metric: str
    value: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Promotion:
    alias: AliasLine | None
    moved: bool
    differences: Sequence[ScoreDifference]


@dataclass(frozen=True, slots=True)
class Rejection:
    model: str
    candidate: str
    gate: str
    by: str
    reason: str
    decided: datetime


@dataclass(frozen=True, slots=True)
class AliasProtection:
    alias: str
    protected: bool
    changed: bool
