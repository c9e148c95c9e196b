"""Data of the charts, which charts.js draws with BokehJS: curves by the question that they answer, and histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.logged_rollouts import Histogram
from rlhf_core.errors import shortened
from rlhf_core.report.content import Curves

# Of the phases of RL, in their order; charts.js has the same for lines.
COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")
_MOST_LINES = len(COLOURS)  # of one chart
MOST_POINTS = 2000  # of one curve

# Questions about RL, and the metrics that answer them, in one chart; other metrics follow by their groups.
_QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "reward and KL": ("reward", "score", "kl"),
    "rewards by name": ("reward/",),
    "validation": ("validation/",),
    "completion length": ("completion_length",),
    "entropy": ("entropy",),
    "solved, mixed and hopeless prompts": (
        "solved_share", "mixed_share", "hopeless_share",
        "filtering/all_right_share", "filtering/kept_share", "filtering/all_wrong_share",
        "difficulty/solved_share", "difficulty/mixed_share", "difficulty/hopeless_share",
    ),
    "truncated and distinct": ("truncated_share", "distinct"),
    "loss": ("loss", "policy_loss", "value_loss"),
    "gradient norm": ("gradient_norm",),
    "seconds by phase": ("seconds/",),
}  # fmt: skip
_RIGHT = frozenset({"kl"})  # has an axis of its own beside other curves: its scale is another one
_DERIVED = frozenset({"validation/best", "validation/best_step"})  # follow from others
_DIGITS = 6
_MOST_CHECKPOINTS = 40
_LONGEST_REASON = 120  # characters

Chart = dict[str, Any]  # as charts.js reads it


@dataclass(frozen=True, slots=True)
class GroupedCurves:
    charts: Mapping[str, Curves]  # title -> curves
    constants: Mapping[str, float]  # metrics that have one value throughout


def grouped(curves: Curves) -> GroupedCurves:
    """Return the curves by the question that they answer, and apart from them those that never change."""
    finite = {
        name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items() if name not in _DERIVED
    }
    constants = {name: points[0][1] for name, points in finite.items() if points and len({y for _, y in points}) == 1}
    rest = {name: points for name, points in finite.items() if points and name not in constants}
    charts: dict[str, Curves] = {}
    for title, names in _QUESTIONS.items():
        chosen = {name: rest[name] for each in names for name in sorted(rest) if _answers(name, each)}
        if chosen:
            charts[title] = chosen
            rest = {name: points for name, points in rest.items() if name not in chosen}
    for name, points in sorted(rest.items()):
        charts.setdefault(name.partition("/")[0], {})[name] = points
    return GroupedCurves(charts, constants)


def curve_charts(charts: Mapping[str, Curves], most_points: int = MOST_POINTS) -> list[Chart]:
    """Return the charts of each title. Steps count from 1; of a long curve every n-th point is drawn, and the last."""
    drawn: list[Chart] = []
    for title, curves in charts.items():
        has_left = not _RIGHT.issuperset(curves)
        lines = [
            {"name": name, "right": has_left and name in _RIGHT, **_line(points, most_points)}
            for name, points in curves.items()
        ]
        drawn += charts_of_lines(title, lines)
    return drawn


def charts_of_lines(title: str, lines: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return one chart, or as many as the lines need; each of several says in its title which lines it has."""
    parts = [lines[start : start + _MOST_LINES] for start in range(0, len(lines), _MOST_LINES)]
    if len(parts) == 1:
        return [{"title": title, "lines": lines}]
    ends = [min(_MOST_LINES * number, len(lines)) for number in range(1, len(parts) + 1)]
    return [
        {"title": f"{title}, lines {end - len(part) + 1} to {end} of {len(lines)}", "lines": part}
        for part, end in zip(parts, ends, strict=True)
    ]


def marks(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return the events of a stage's attempts that have a step, for its charts: where each ended, and why, where it was
    resumed, and its checkpoints, unless these are too many to be told apart.

    kind: end, resume or checkpoint.
    """
    events = [
        {"step": step, "kind": kind, "text": text}
        for each in attempts
        for step, kind, text in (
            (each.resumed_after, "resume", "resumed from the checkpoint"),
            (each.step if each.outcome not in ("published", "running") else None, "end", _ended(each)),
        )
        if step is not None
    ]
    checkpoints = sorted({step for each in attempts for step in each.checkpoints})
    if len(checkpoints) <= _MOST_CHECKPOINTS:
        events += [{"step": step, "kind": "checkpoint", "text": "checkpoint"} for step in checkpoints]
    return sorted(events, key=lambda event: event["step"])


def _ended(attempt: Attempt) -> str:
    return f"{attempt.outcome}: {shortened(attempt.reason, _LONGEST_REASON)}" if attempt.reason else attempt.outcome


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return every n-th point of a curve, so that there are about so many, and the last."""
    every = -(-len(points) // most)
    return points[:-1:every] + points[-1:]


def histogram_charts(histograms: Mapping[str, Histogram]) -> list[Chart]:
    return [
        {"title": name, "edges": histogram.edges, "counts": histogram.counts} for name, histogram in histograms.items()
    ]


def _answers(name: str, metric: str) -> bool:
    return name == metric or (metric.endswith("/") and name.startswith(metric))


def _line(points: list[tuple[float, float]], most: int) -> dict[str, list[float]]:
    drawn = thinned(points, most)
    return {"x": [x + 1 for x, _ in drawn], "y": [float(f"{y:.{_DIGITS}g}") for _, y in drawn]}
