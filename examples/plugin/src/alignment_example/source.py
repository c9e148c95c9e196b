"""A source of rows: numbered questions, each with the answer `b`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from rlhf_core.config.data.sources import SourceConfig, SourceEntry
from rlhf_core.config.numbers import Rows
from rlhf_core.contract import StageContext
from rlhf_core.data.sources.base import BadRow, Located, RowSource


class NumberedConfig(SourceConfig):
    type: Literal["numbered"]
    size: Rows = Field(description="number of questions")

    @property
    def known_rows(self) -> int:
        return self.size


class Numbered(RowSource[NumberedConfig]):
    def rows(self, context: StageContext, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        yield from self._questions(self.config.size)

    def first_rows(self, root: Path, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        yield from self._questions(min(self.config.size, 100))

    def _questions(self, size: int) -> Iterator[Located]:
        for number in range(size):
            yield f"question {number}", {"prompt": [{"role": "user", "content": f"{number}?"}], "answer": "b"}


NUMBERED = SourceEntry(NumberedConfig, "alignment_example.source:Numbered")
