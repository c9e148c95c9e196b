"""What a tracker is to the job: a destination of metrics, and what it is told of the stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Sink(Protocol):
    """A destination of metrics. One of a plugin is made by `of(config, folder, about)`, with an empty folder."""

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class About:
    """The stage whose metrics a tracker gets."""

    name: str  # the recipe's node
    run_id: str
    key: str
    config: Mapping[str, Any]
