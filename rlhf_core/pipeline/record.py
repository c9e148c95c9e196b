"""What a run used and made: one JSON document in the store, at runs/<run id>/run.json."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config

Outcome = Literal["reused", "computed", "failed", "not run"]


class NodeRecord(Config):
    name: str
    ref: ArtifactRef
    outcome: Outcome
    seconds: float = 0.0  # this run's; of a reused stage, the look-up
    metrics: dict[str, float | int | str | None] = Field(default_factory=dict)
    error: str = ""


class RunRecord(Config):
    run_id: str
    recipe: dict[str, Any]  # resolved
    overrides: tuple[str, ...]
    started_at: datetime
    finished_at: datetime
    nodes: tuple[NodeRecord, ...]

    @property
    def succeeded(self) -> bool:
        return all(node.outcome in ("reused", "computed") for node in self.nodes)


def record_path(run_id: str) -> str:
    return f"runs/{run_id}/run.json"


def report_path(run_id: str) -> str:
    """Where a run's HTML report lies in the store, beside its record."""
    return f"runs/{run_id}/report.html"


def write_record(store: Store, record: RunRecord) -> None:
    """A retried run writes its record anew."""
    store.put(record_path(record.run_id), record.model_dump_json(indent=1).encode())


def read_record(store: Store, run_id: str) -> RunRecord | None:
    data = store.get(record_path(run_id))
    return None if data is None else RunRecord.model_validate_json(data)


def main_figures(stage: str, metrics: Mapping[str, float | int | str | None]) -> str:
    """The figures of a stage that fit into one cell of a table; a stage's manifest names the weightiest first."""
    figures = [(name, value) for name, value in metrics.items() if value is not None and not _is_bound(name)]
    return ", ".join(f"{name} {number(value)}" for name, value in figures[: 2 if stage != "rl" else 3])


def with_interval(metrics: Mapping[str, float | int | str | None], name: str) -> str:
    """`0.431 (0.380–0.483)` where the metrics have the bounds of the interval, else the number alone."""
    value, low, high = (metrics.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return "–"
    if low is None or high is None:
        return number(value)
    return f"{number(value)} ({number(low)}–{number(high)})"


def compared_metrics(nodes: Mapping[str, Mapping[str, float | int | str | None]]) -> list[str]:
    """Names of the metrics that a comparison of models shows, given each model's metrics: no bounds, in their order."""
    names: dict[str, None] = {}
    for metrics in nodes.values():
        names.update(dict.fromkeys(name for name in metrics if not _is_bound(name)))
    return list(names)


def _is_bound(name: str) -> bool:
    return name.endswith(("_low", "_high"))


def number(value: float | int | str | None) -> str:
    """As tables show it: whole numbers without a fraction, others with three digits after the point."""
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.3f}"
    return str(value)
