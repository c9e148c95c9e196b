"""Documents of the commands that verify, repair and clean the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Objects:
    count: int
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Garbage:
    kept: Mapping[str, Objects]  # by what needs them
    going: Mapping[str, Objects]  # by kind
    deleted: Objects | None  # None without --delete
