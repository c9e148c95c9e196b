"""Curves and the lineage graph as SVG text for the page."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

import matplotlib
import networkx
from matplotlib.figure import Figure

from rlhf_core.report.content import Curves

# These come first, in this order; all other metrics follow, sorted by name.
_FIRST = ("reward", "score", "kl", "completion_length", "entropy", "distinct", "policy_loss", "value_loss", "loss")
# These follow from others.
_NOT_DRAWN = ("validation/best", "validation/best_step")


def curve_grid(curves: Curves) -> str:
    """Draw small multiples, one per metric of one stage; empty if no metric has at least two points."""
    lines = [name for name in curves if len(curves[name]) > 1]
    names = [name for name in _FIRST if name in lines]
    names += sorted(name for name in lines if name.startswith(("validation/", "monitor/")) and name not in _NOT_DRAWN)
    names += sorted(name for name in lines if name not in _FIRST and "/" not in name)
    if not names:
        return ""
    columns = 3
    rows = -(-len(names) // columns)
    height = 2.2 * rows
    figure = Figure(figsize=(11, height))
    # Places of our own: matplotlib's search for them takes twice as long as all the drawing.
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.3 / height, top=1 - 0.3 / height, wspace=0.2, hspace=0.45)
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        steps, values = zip(*curves[name], strict=True)
        axes.plot(steps, values, linewidth=1.2, color="#3367d6")
        axes.set_title(name, fontsize=9, loc="left", y=1.02)
        axes.locator_params(nbins=4)
        axes.yaxis.set_major_formatter("{x:g}")  # a common offset would be written over the title
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return _svg(figure)


def phase_bars(curves: Curves) -> str:
    """Draw the mean seconds of each phase of an RL step."""
    phases = {n.removeprefix("seconds/"): [v for _, v in p] for n, p in curves.items() if n.startswith("seconds/")}
    if not phases:
        return ""
    figure = Figure(figsize=(11, 0.3 * len(phases) + 0.6), layout="constrained")
    axes = figure.add_subplot()
    means = {phase: sum(seconds) / len(seconds) for phase, seconds in phases.items()}
    axes.barh(list(means), list(means.values()), color="#8ab4f8")
    axes.invert_yaxis()
    axes.set_xlabel("mean seconds per step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return _svg(figure)


def lineage(edges: Sequence[tuple[str, str]]) -> str:
    """Draw the graph of artifacts, each to the right of its inputs."""
    graph = networkx.DiGraph(edges)
    for column, names in enumerate(networkx.topological_generations(graph)):
        for name in names:
            graph.nodes[name]["subset"] = column
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.margins(x=0.1)
    networkx.draw_networkx(
        graph, networkx.multipartite_layout(graph), ax=axes, node_size=0, font_size=8, edge_color="#9aa0a6",
        bbox={"boxstyle": "round,pad=0.4", "facecolor": "#e8f0fe", "edgecolor": "#3367d6"},
        min_source_margin=30, min_target_margin=30,
    )  # fmt: skip
    return _svg(figure)


def _svg(figure: Figure) -> str:
    # The same content gives the same bytes: an artifact contains no time stamps and no random ids.
    out = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
