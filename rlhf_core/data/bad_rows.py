"""Rows that cannot be read, or lack a field of their format: an error, or dropped and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.data.formats import Row, RowError, canonical_row
from rlhf_core.data.images import ImageReader
from rlhf_core.data.sources.files import BadRow, raise_bad_row

_EXAMPLES = 3
_REASONS = 20


@dataclass
class BadRows:
    """Counts dropped rows by reason, and keeps the messages of the first three. A BadRow of `on_bad_row: drop`."""

    reasons: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.reasons.values())

    def __call__(self, where: str, error: RowError) -> None:
        reason = error.reason if error.reason in self.reasons or len(self.reasons) < _REASONS else "other reasons"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(str(error.at(where)))

    def info(self) -> dict[str, Any]:
        return {"rows": self.count, "reasons": self.reasons, "examples": self.examples}

    def sentence(self) -> str:
        """Return `3 bad rows are dropped: 2 no column `prompt`, 1 not JSON; first: d.jsonl line 2: no column …`."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return (
            f"{self.count} bad row{'s are' if self.count > 1 else ' is'} dropped: {reasons}; first: {self.examples[0]}"
        )


def bad_row_policy(config: DatasetConfig, counted: BadRows) -> BadRow:
    """Return the handler of the dataset's bad rows: it raises their RowError, or counts it in `counted`."""
    return counted if config.on_bad_row == "drop" else raise_bad_row


def canonical(
    where: str, raw: Mapping[str, Any], config: DatasetConfig, bad_row: BadRow, images: ImageReader
) -> Row | None:
    """Return the canonical row; None for a bad one, after calling `bad_row`."""
    try:
        return canonical_row(raw, config.format, config.columns, images)
    except RowError as error:
        bad_row(where, error)
        return None
