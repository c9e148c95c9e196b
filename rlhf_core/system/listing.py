"""Lists of names, for sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs twice."""
    counts = Counter(names)
    return next((name for name in names if counts[name] > 1), None)


def some(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
