"""The interface of a tracker: a destination of metrics, and what it is told of the stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Sink(Protocol):
    """A destination of metrics. One of the table is made by `of(config, folder, about)`, with an empty folder.

    It gets all lines of the stage from the first, also in a job that resumes: one that continues what a killed job sent
    leaves out as many lines as arrived.
    """

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class About:
    """The stage whose metrics a tracker gets."""

    name: str  # the recipe's node
    run_id: str
    key: str
    config: Mapping[str, Any]
    computation: str  # that of a job and of those that resume it, which continue one run of a tracker
