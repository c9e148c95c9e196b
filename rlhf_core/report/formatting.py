"""Formatting of metrics for the tables and the report."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import timedelta

from rlhf_core.artifacts.costs import Cost
from rlhf_core.artifacts.manifest import MetricValue
from rlhf_core.config.prices import PricesConfig
from rlhf_core.config.texts import is_blank

MAIN_METRICS = 3
BLANK_LINES = 6  # shown in a row
LONGEST_ENDING = 160  # characters


def main_metrics(metrics: Mapping[str, MetricValue]) -> str:
    """Format the metrics that fit into one cell of a table; a stage's manifest lists the most important first."""
    values = [(name, value) for name, value in metrics.items() if value is not None and not _is_bound(name)]
    return ", ".join(f"{name} {number(value)}" for name, value in values[:MAIN_METRICS])


def with_interval(metrics: Mapping[str, MetricValue], name: str) -> str:
    """Format `0.431 (0.380–0.483)` if the metrics have the bounds of the interval, else only the number."""
    value, low, high = (metrics.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return "–"
    if low is None or high is None:
        return number(value)
    return f"{number(value)} ({number(low)}–{number(high)})"


def compared_metrics(nodes: Mapping[str, Mapping[str, MetricValue]]) -> list[str]:
    """Return the names of metrics to compare models by, in order, without bounds of intervals."""
    names: dict[str, None] = {}
    for metrics in nodes.values():
        names.update(dict.fromkeys(name for name in metrics if not _is_bound(name)))
    return list(names)


def _is_bound(name: str) -> bool:
    return name.endswith(("_low", "_high"))


def number(value: float | int | str | None) -> str:
    """Format integers without a fraction, other numbers with three digits after the point."""
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.3f}"
    return str(value)


def money(cost: Cost, prices: PricesConfig | None) -> str:
    """Format `12.30 EUR`, `+ ?` behind it where a part has no price; empty without prices."""
    if prices is None:
        return ""
    return f"{amount(cost.money)} {prices.currency}{' + ?' if cost.unpriced else ''}"


def amount(value: float) -> str:
    """Format money: with two digits after the point, or the first two that are not 0."""
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g}"


def energy(joules: Mapping[str, float]) -> str:
    """Format `0.12 kWh gpu, 0.03 kWh cpu`; empty where no machine told."""
    return ", ".join(f"{each / 3.6e6:.3g} kWh {kind}" for kind, each in joules.items())


def duration(seconds: float) -> str:
    """Format `0.2 s`, `47 s`, `3:05`, `1:02:03`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")


def ending(text: str) -> str:
    """Return the end of a completion in one line, `…` before it if the beginning is left out."""
    line = " ".join(text.split()) or "(empty)"
    return line if len(line) <= LONGEST_ENDING else f"…{line[1 - LONGEST_ENDING :]}"


def visible(text: str) -> str:
    """Format a completion for a page: each blank line becomes `⏎`, at most six in a row."""
    lines = text.split("\n") if text.strip("\n") else [""] * len(text)
    shown: list[str] = []
    for is_empty, run in itertools.groupby(lines, key=is_blank):
        run_lines = list(run)
        shown += ["⏎"] * min(len(run_lines), BLANK_LINES) if is_empty else run_lines
        if is_empty and len(run_lines) > BLANK_LINES:
            shown.append(f"… and {len(run_lines) - BLANK_LINES} more blank lines")
    return "\n".join(shown) if shown else "(empty)"
