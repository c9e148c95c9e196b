"""Conversion of source rows to canonical rows, with all criteria for keeping a row.

Everything here depends on one row only, so that several processes can share the work (processes.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.data.formats import Row, RowError, canonical_row, format_of, normalised
from rlhf_core.data.images import ImageReader
from rlhf_core.data.near_duplicates import Sketcher, Sketches
from rlhf_core.data.overlap import PromptIndex
from rlhf_core.data.reading import row_text

Located = tuple[str, Row | RowError]  # where it is; the row as its source has it, or why it could not be read


@dataclass(frozen=True, slots=True)
class Checked:
    """A canonical row."""

    id: str
    task: str | None
    text: str  # the row as JSON
    key: int  # rows with the same are duplicates: 64 bits


@dataclass(frozen=True, slots=True)
class Bad:
    where: str
    error: RowError


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    rows: list[Checked | Bad | None]  # None: it has a prompt that is excluded
    sketches: Sketches | None = None  # of those that are Checked; none: no near-duplicates are looked for
    near_prompt: NDArray[np.bool_] | None = None  # whether each of them nearly has an excluded prompt


class Checker:
    """Picklable: each process may have one."""

    def __init__(self, config: DatasetConfig, excluded: PromptIndex, images: ImageReader) -> None:
        self._config = config
        self._images = images
        self._excluded = excluded
        self._sketcher: Sketcher | None = None
        if config.near_duplicates != "off":
            self._sketcher = Sketcher(excluded.prompts, config.near_duplicate_threshold)

    def __call__(self, batch: Sequence[Located]) -> CheckedBatch:
        data_format = format_of(self._config.format)
        rows: list[Checked | Bad | None] = []
        texts: list[str] = []
        questions: list[str] = []
        for where, raw in batch:
            try:
                row = self._canonical(raw)
            except RowError as error:
                # Errors of some formats cannot be pickled.
                rows.append(Bad(where, RowError(str(error), error.reason)))
                continue
            if self._excluded.find(row, data_format):
                rows.append(None)
                continue
            key = hashlib.sha256(data_format.duplicate_key(row).encode()).digest()[:8]
            rows.append(Checked(row["id"], row.get("task"), row_text(row), int.from_bytes(key, "little")))
            if self._sketcher is not None:
                texts.append(normalised(data_format.whole_text(row)))
                questions.append(normalised(data_format.asked_text(row)))
        if self._sketcher is None:
            return CheckedBatch(rows)
        return CheckedBatch(rows, *self._sketcher(texts, questions))

    def _canonical(self, raw: Row | RowError) -> Row:
        if isinstance(raw, RowError):
            raise raw
        return canonical_row(raw, self._config.format, self._config.columns, self._images)
