"""Rows that are too long for the stage that reads them: an error, dropped or truncated, as their dataset says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlhf_core.config.data import LongRowPolicy
from rlhf_core.errors import StageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fitted(Generic[T]):
    """The rows that a stage reads, and what became of those that were too long."""

    rows: list[T]
    policy: LongRowPolicy
    dropped: int = 0
    truncated: int = 0

    def metrics(self, prefix: str = "") -> dict[str, int]:
        """For the stage's manifest; empty where a row that is too long is an error."""
        match self.policy:
            case "error":
                return {}
            case "drop":
                return {f"{prefix}rows_dropped_too_long": self.dropped}
            case "truncate":
                return {f"{prefix}rows_truncated": self.truncated, f"{prefix}rows_dropped_too_long": self.dropped}


def fit(
    rows: Iterable[T],
    policy: LongRowPolicy,
    *,
    problem: Callable[[T], str | None],
    truncate: Callable[[T], T | None],
) -> Fitted[T]:
    """`rows` without those that are too long, or with these truncated.

    problem: of a row, the sentence that says that it is too long, and of one that fits None; truncate: the row, cut to
    fit, or None if nothing would be left of what it is for: such a row is dropped.
    Raises StageError with the sentence of the first row that is too long, where the policy is `error`.
    """
    kept: list[T] = []
    dropped = truncated = 0
    for row in rows:
        sentence = problem(row)
        if sentence is None:
            kept.append(row)
            continue
        if policy == "error":
            raise StageError(sentence)
        cut = truncate(row) if policy == "truncate" else None
        if cut is None:
            dropped += 1
        else:
            kept.append(cut)
            truncated += 1
    return Fitted(kept, policy, dropped, truncated)
