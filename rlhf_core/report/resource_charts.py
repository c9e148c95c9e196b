"""Charts of what the processes of a stage used over time, for charts.js."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlhf_core.artifacts.resources import AttemptUses, ProcessUses
from rlhf_core.report.charts import MOST_POINTS, Chart, charts_of_lines, thinned

_GIB = 2**30
_Column = Callable[[ProcessUses], Sequence[float | None]]
_QUANTITIES: Mapping[str, _Column] = {
    "cores in use": lambda uses: uses.cores,
    "memory, GiB": lambda uses: _gib(uses.host_bytes),
    "GPUs busy, share": lambda uses: uses.gpu_share,
    "GPU memory, GiB": lambda uses: _gib(uses.gpu_bytes),
}


def resource_charts(attempts: Sequence[AttemptUses], most_points: int = MOST_POINTS) -> list[Chart]:
    """Return a chart of each quantity that was measured: a line for each process, over minutes since the first
    attempt. Of a long line every n-th point is drawn, and the last.
    """
    charts: list[Chart] = []
    for title, column in _QUANTITIES.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for attempt in attempts:
            offset = (attempt.started_at - attempts[0].started_at).total_seconds()
            for name, uses in attempt.processes.items():
                known = [
                    ((offset + seconds) / 60, value)
                    for seconds, value in zip(uses.seconds, column(uses), strict=True)
                    if value is not None
                ]
                if known:
                    points.setdefault(name, []).extend(known)
        lines = [
            {"name": name, "x": [round(x, 2) for x, _ in drawn], "y": [y for _, y in drawn]}
            for name, each in points.items()
            if (drawn := thinned(each, most_points))
        ]
        charts += [{**chart, "x": "minutes"} for chart in charts_of_lines(title, lines)]
    return charts


def _gib(values: Sequence[int | None]) -> list[float | None]:
    return [None if value is None else value / _GIB for value in values]
