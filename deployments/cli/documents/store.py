"""Documents of the commands that verify and repair the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DamagedObject:
    object: str
    damage: str
    artifacts: Sequence[str]
    repair: str  # empty: nothing was done


@dataclass(frozen=True, slots=True)
class Integrity:
    artifacts: int
    blobs: int
    bytes_read: int
    damaged: Sequence[DamagedObject]
    to_compute_again: Sequence[str]
