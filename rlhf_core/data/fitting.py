"""Rows that a stage cannot use as they are: an error, dropped or truncated, by their dataset's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from rlhf_core.config.data.dataset import BadRowPolicy, LongRowPolicy
from rlhf_core.data.bad_rows import BadRows
from rlhf_core.data.formats import RowError
from rlhf_core.errors import ConversationError, StageError
from rlhf_core.processes.in_order import in_order

T = TypeVar("T")
S = TypeVar("S", bound=Sequence[Any], covariant=True)
Row = Mapping[str, Any]
_ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """A dataset's treatment of such rows: `on_long_row` and `on_bad_row` of its settings."""

    long: LongRowPolicy = "error"
    bad: BadRowPolicy = "error"


@dataclass(frozen=True, slots=True)
class Fitted(Generic[S]):
    """The rows that a stage reads, and counts of the others."""

    rows: S
    policy: RowPolicy
    bad: int = 0  # rows dropped that the chat template cannot write
    too_long: int = 0  # rows dropped, of those that it can
    truncated: int = 0
    read: int = 0  # rows of the dataset, with those dropped

    def metrics(self, prefix: str = "") -> dict[str, int]:
        """Return the counts of read, dropped and truncated rows for the stage's manifest."""
        counts = {"rows_read": self.read}
        if self.policy.bad == "drop":
            counts["rows_dropped_bad"] = self.bad
        if self.policy.long != "error":
            counts["rows_dropped_too_long"] = self.too_long
        if self.policy.long == "truncate":
            counts["rows_truncated"] = self.truncated
        return {f"{prefix}{name}": count for name, count in counts.items()}


@dataclass(frozen=True, slots=True)
class Fitting(Generic[T]):
    """Conversion of canonical rows for a stage. Picklable, if its functions are.

    encode: converts a row; raises ConversationError for one that the chat template cannot render;
    problem: returns a message if the row is too long, None if it fits; truncate: shortens it to fit, or returns None if
    nothing to train on would be left: it is dropped then.
    """

    encode: Callable[[Row], Iterable[T]]
    problem: Callable[[T], str | None]
    truncate: Callable[[T], T | None]
    policy: RowPolicy

    def __call__(self, rows: Sequence[Row]) -> _Part[T]:
        """Convert the rows. Raises StageError with the first message where the policy is `error`."""
        part: _Part[T] = _Part(read=len(rows))
        for item in self._encoded(rows, part):
            sentence = self.problem(item)
            if sentence is None:
                part.kept.append(item)
                continue
            if self.policy.long == "error":
                raise StageError(sentence)
            cut = self.truncate(item) if self.policy.long == "truncate" else None
            if cut is None:
                part.too_long += 1
            else:
                part.kept.append(cut)
                part.truncated += 1
        return part

    def _encoded(self, rows: Sequence[Row], part: _Part[T]) -> Iterator[T]:
        for row in rows:
            try:
                yield from self.encode(row)
            except ConversationError as error:
                place = f"row {row['id']}"
                if self.policy.bad == "error":
                    raise StageError(f"{place}: {error}; or drop such rows (the dataset's on_bad_row)") from error
                part.bad.append((place, str(error)))


@dataclass(slots=True)
class _Part(Generic[T]):
    """The result of some of the rows."""

    kept: list[T] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)  # place and reason
    too_long: int = 0
    truncated: int = 0
    read: int = 0


def fit(rows: Iterable[Row], fitting: Fitting[T], *, keep: Callable[[Iterable[T]], S], processes: int = 1) -> Fitted[S]:
    """Return canonical rows as converted by `fitting`, long ones dropped or truncated.

    keep: stores the rows, in memory or elsewhere, as they come.
    Raises StageError as `fitting` does, or if the chat template can render none of the rows.
    """
    bad = BadRows()
    total: _Part[T] = _Part()

    def kept() -> Iterator[T]:
        with closing(in_order(fitting, _batches(rows), processes)) as parts:
            for part in parts:
                for place, reason in part.bad:
                    bad(place, RowError(reason, "the chat template cannot write it"))
                total.read += part.read
                total.too_long += part.too_long
                total.truncated += part.truncated
                yield from part.kept

    kept_rows = keep(kept())
    if bad.count and not kept_rows and not total.too_long:
        raise StageError(f"the chat template can write none of the {bad.count} rows; the first, {bad.examples[0]}")
    return Fitted(kept_rows, fitting.policy, bad.count, total.too_long, total.truncated, total.read)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    left = iter(rows)
    while batch := list(islice(left, _ROWS_AT_ONCE)):
        yield batch
