"""Rows that a stage cannot use as they are: an error, dropped or truncated, as their dataset says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlhf_core.config.data import BadRowPolicy, LongRowPolicy
from rlhf_core.data.bad_rows import BadRows
from rlhf_core.data.formats import RowError
from rlhf_core.errors import ConversationError, StageError

T = TypeVar("T")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """What a dataset wants of such rows: `on_long_row` and `on_bad_row` of its settings."""

    long: LongRowPolicy = "error"
    bad: BadRowPolicy = "error"


@dataclass(frozen=True, slots=True)
class Fitted(Generic[T]):
    """What a stage reads, and what became of the rest."""

    rows: list[T]
    policy: RowPolicy
    bad: int = 0  # rows dropped that the chat template cannot write
    too_long: int = 0  # rows dropped, of those that it can
    truncated: int = 0

    def metrics(self, prefix: str = "") -> dict[str, int]:
        """For the stage's manifest: the counts of what is not an error."""
        counts = {}
        if self.policy.bad == "drop":
            counts["rows_dropped_bad"] = self.bad
        if self.policy.long != "error":
            counts["rows_dropped_too_long"] = self.too_long
        if self.policy.long == "truncate":
            counts["rows_truncated"] = self.truncated
        return {f"{prefix}{name}": count for name, count in counts.items()}


def fit(
    rows: Iterable[Row],
    encode: Callable[[Row], Iterable[T]],
    policy: RowPolicy,
    *,
    problem: Callable[[T], str | None],
    truncate: Callable[[T], T | None],
) -> Fitted[T]:
    """What `encode` makes of canonical rows, without what is too long, or with that truncated.

    encode: a row as what the stage reads; raises ConversationError for one that the chat template cannot write;
    problem: the sentence that says that something is too long, None if it fits; truncate: the same, cut to fit, or None
    if nothing would be left of what it is for: it is dropped then.
    Raises StageError with the first such sentence where the policy is `error`.
    """
    bad = BadRows()
    kept: list[T] = []
    dropped = truncated = 0
    for item in _encoded(rows, encode, policy.bad, bad):
        sentence = problem(item)
        if sentence is None:
            kept.append(item)
            continue
        if policy.long == "error":
            raise StageError(sentence)
        cut = truncate(item) if policy.long == "truncate" else None
        if cut is None:
            dropped += 1
        else:
            kept.append(cut)
            truncated += 1
    if bad.count and not kept and not dropped:
        raise StageError(f"the chat template can write none of the {bad.count} rows; the first, {bad.examples[0]}")
    return Fitted(kept, policy, bad.count, dropped, truncated)


def _encoded(
    rows: Iterable[Row], encode: Callable[[Row], Iterable[T]], policy: BadRowPolicy, bad: BadRows
) -> Iterator[T]:
    """bad: counts the rows that cannot be encoded."""
    for row in rows:
        try:
            yield from encode(row)
        except ConversationError as error:
            place = f"row {row['id']}"
            if policy == "error":
                raise StageError(f"{place}: {error}; or drop such rows (the dataset's on_bad_row)") from error
            bad(place, RowError(str(error), "the chat template cannot write it"))
