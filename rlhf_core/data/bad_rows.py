"""Rows that cannot be read, or lack a field of their format: an error, or dropped and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.data.formats import Row, RowError, canonical_row
from rlhf_core.data.images import ImageReader
from rlhf_core.data.sources.base import BadRow

_EXAMPLES = 3
_REASONS = 20


@dataclass
class BadRows:
    """Counts bad rows by reason, and keeps the messages and places of the first three. A BadRow."""

    reasons: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    _first: dict[str, list[str]] = field(default_factory=dict)  # of each reason a message, then places of further rows

    @property
    def count(self) -> int:
        return sum(self.reasons.values())

    def __call__(self, where: str, error: RowError) -> None:
        reason = error.reason if error.reason in self.reasons or len(self.reasons) < _REASONS else "other reasons"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(str(error.at(where)))
        first = self._first.setdefault(reason, [])
        if len(first) < _EXAMPLES:
            first.append(where if first else str(error.at(where)))

    def info(self) -> dict[str, Any]:
        return {"rows": self.count, "reasons": self.reasons, "examples": self.examples}

    def problem(self, read: int) -> str:
        """Return the error of all of them: the first message of each of three reasons, places and counts.

        read: good and bad rows that were read.
        """
        if self.count == 1:
            return self.examples[0] + ("; correct it, or drop it (the dataset's on_bad_row)" if read > 1 else "")
        shown = list(self._first.items())[:_EXAMPLES]
        parts = []
        for reason, (message, *further) in shown:
            alike = f" ({self.reasons[reason]} such rows, also {', '.join(further)})" if further else ""
            parts.append(f"{message}{alike}")
        if others := self.count - sum(self.reasons[reason] for reason, _ in shown):
            parts.append(f"{others} for other reasons")
        remedy = "; correct them, or drop them (the dataset's on_bad_row)" if self.count < read else ""
        return f"{self.count} bad rows of {read} read: {'; '.join(parts)}{remedy}"

    def sentence(self) -> str:
        """Return `3 bad rows are dropped: 2 no column `prompt`, 1 not JSON; first: d.jsonl line 2: no column …`."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return (
            f"{self.count} bad row{'s are' if self.count > 1 else ' is'} dropped: {reasons}; first: {self.examples[0]}"
        )


def canonical(
    where: str, raw: Mapping[str, Any], config: DatasetConfig, bad_row: BadRow, images: ImageReader
) -> Row | None:
    """Return the canonical row; None for a bad one, after calling `bad_row`."""
    try:
        return canonical_row(raw, config.format, config.columns, images)
    except RowError as error:
        bad_row(where, error)
        return None
