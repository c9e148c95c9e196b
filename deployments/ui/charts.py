"""Data of the charts, which charts.js draws with BokehJS: curves by the question that they answer, and histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bokeh

from rlhf_core.artifacts.logged_rollouts import Histogram
from rlhf_core.report.content import Curves

_JAVASCRIPT = Path(bokeh.__file__).parent / "server" / "static" / "js"
BOKEH = [_JAVASCRIPT / name for name in ("bokeh.min.js", "bokeh-api.min.js")]  # in the order in which they load
# Of the phases of RL, in their order; charts.js has the same for lines.
COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
_MOST_LINES = 10  # of one chart
_MOST_POINTS = 2000  # of one curve

# Questions about RL, and the metrics that answer them, in one chart; other metrics follow by their groups.
_QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward", "score"),
    "rewards by name": ("reward/",),
    "validation": ("validation/",),
    "KL to the reference": ("kl",),
    "completion length": ("completion_length",),
    "entropy": ("entropy",),
    "truncated, distinct, solved and hopeless": ("truncated_share", "distinct", "solved_share", "hopeless_share"),
    "loss": ("loss", "policy_loss", "value_loss"),
    "gradient norm": ("gradient_norm",),
    "seconds by phase": ("seconds/",),
}

Chart = dict[str, Any]  # as charts.js reads it


@dataclass(frozen=True, slots=True)
class GroupedCurves:
    charts: Mapping[str, Curves]  # title -> curves
    constants: Mapping[str, float]  # metrics that have one value throughout


def grouped(curves: Curves) -> GroupedCurves:
    """Return the curves by the question that they answer, and apart from them those that never change."""
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    constants = {name: points[0][1] for name, points in finite.items() if points and len({y for _, y in points}) == 1}
    rest = {name: points for name, points in finite.items() if points and name not in constants}
    charts: dict[str, Curves] = {}
    for title, names in _QUESTIONS.items():
        chosen = {name: points for name, points in rest.items() if _answers(name, names)}
        if chosen:
            charts[title] = chosen
            rest = {name: points for name, points in rest.items() if name not in chosen}
    for name, points in sorted(rest.items()):
        charts.setdefault(name.partition("/")[0], {})[name] = points
    return GroupedCurves(charts, constants)


def curve_charts(charts: Mapping[str, Curves]) -> list[Chart]:
    """Return one chart for each title. Steps count from 1; of a long curve every n-th point is drawn, and the last."""
    return [
        {
            "title": title,
            "lines": [
                {"name": name, "x": [x + 1 for x, _ in points], "y": [y for _, y in points]}
                for name, points in ((name, _thinned(points)) for name, points in sorted(curves.items())[:_MOST_LINES])
            ],
        }
        for title, curves in charts.items()
    ]


def histogram_charts(histograms: Mapping[str, Histogram]) -> list[Chart]:
    return [
        {"title": name, "edges": histogram.edges, "counts": histogram.counts} for name, histogram in histograms.items()
    ]


def _answers(name: str, names: tuple[str, ...]) -> bool:
    return any(name == each or (each.endswith("/") and name.startswith(each)) for each in names)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // _MOST_POINTS)
    return points[:-1:every] + points[-1:]
