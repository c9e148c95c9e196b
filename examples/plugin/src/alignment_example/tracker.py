"""A tracker: every metric as a line of a table of comma-separated values."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from rlhf_core.config.tracking import TrackerConfig, TrackerEntry
from rlhf_core.tracking.sink import About


class CSVConfig(TrackerConfig):
    """A file metrics.csv with a line for each metric of each step."""

    type: Literal["csv"]
    digits: int = Field(default=6, ge=1, le=17, description="that are significant")


class CSV:
    def __init__(self, file: Path, digits: int, node: str) -> None:
        self._file = file.open("w", encoding="utf-8", newline="")
        self._lines = csv.writer(self._file)
        self._digits, self._node = digits, node
        self._lines.writerow(["node", "step", "metric", "value"])

    @classmethod
    def of(cls, config: CSVConfig, folder: Path, about: About) -> CSV:
        return cls(folder / "metrics.csv", config.digits, about.name)

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._lines.writerow([self._node, step, name, f"{value:.{self._digits}g}"])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


CSV_FILES = TrackerEntry(CSVConfig, "alignment_example.tracker:CSV")
