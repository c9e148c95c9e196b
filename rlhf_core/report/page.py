"""The report as one HTML page below 3 MB: templates, style and chart code of `alignment ui`, and the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from markupsafe import Markup

from rlhf_core.artifacts.logged_rollouts import LoggedStep
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.report.bounds import Limits, bounded, within
from rlhf_core.report.content import Content, Curves
from rlhf_core.report.lineage import lineage_picture
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.run_part import RunPart, run_context
from rlhf_core.report.sections import StageSection, stage_section, step_section
from rlhf_core.report.templating import asset, bokeh, environment, quoted, standalone

MOST_BYTES = 3_000_000
_RUN_BYTES = 250_000  # of them for the part about the run
# No inserted text has them: it is escaped.
_BEGIN, _END = Markup("<!-- the run -->"), Markup("<!-- end of the run -->")


def render(
    content: Content, nodes: Sequence[NodeView], rollouts: Mapping[str, Sequence[LoggedStep]], *, title: str,
    revision: str, libraries: Mapping[str, str],
) -> str:  # fmt: skip
    """Render the page, without costs and times, which `with_run` adds. rollouts: by stage, the steps that are shown."""
    names = {node.ref: node.name for node in nodes}
    inputs = {node.name: node.manifest.parents for node in nodes if node.manifest is not None}
    drawn = replace(content, curves={}, stages=[], edges=[])  # all of them are drawn from `nodes`
    seeds = {node.manifest.seed for node in nodes if node.manifest is not None and node.manifest.seed is not None}

    def page(limits: Limits) -> str:
        left_out = Counter[str]({"stages": max(0, len(nodes) - limits.items)})
        shown = nodes[: limits.items]
        sections = [
            _section(node, content.curves.get(node.name, {}), rollouts.get(node.name, ()), names, limits, left_out)
            for node in shown
        ]
        text = {
            "title": title, "content": drawn, "revision": revision, "libraries": libraries, "seeds": sorted(seeds),
        }  # fmt: skip
        context = {
            **{name: bounded(value, limits, left_out, name) for name, value in text.items()},
            "training": [section for section in sections if section.charts],
            "others": [section for section in sections if not section.charts], "nodes": shown,
            "stages_left_out": len(nodes) - len(shown), "place": _place, "lineage": lineage_picture(shown, inputs),
            "logged": {section.name: section.rollouts[-1].step for section in sections if section.rollouts},
            "begin": _BEGIN, "end": _END,
            "left_out": [f"{number} {name}" for name, number in left_out.items() if number],
        }  # fmt: skip
        return standalone("report.html", context, bokeh(), asset("charts.js"), asset("tokens.js"))

    return within(MOST_BYTES - _RUN_BYTES, page)


def with_run(page: str, part: RunPart) -> str:
    """Return a rendered page with the part about one of the runs that have these results."""
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError("the page is not a report: it has no place for the part about a run")
    template = environment().get_template("run_part.html")
    text = within(_RUN_BYTES, lambda limits: template.render(**run_context(part, _place, limits)))
    return f"{before}{text}{after}"


def _section(
    node: NodeView, curves: Curves, steps: Sequence[LoggedStep], names: Mapping[ArtifactRef, str], limits: Limits,
    left_out: Counter[str],
) -> StageSection:  # fmt: skip
    left_out["points of curves"] += sum(max(0, len(points) - limits.points) for points in curves.values())
    places = [(step.step, f"{_place(node.name)}/steps/{step.step}") for step in steps[: limits.items]]
    section = stage_section(node, curves, names, places, most_points=limits.points)
    rollouts = [step_section(step, limits.tokens) for step in steps]
    left_out["charts"] += max(0, len(section.charts) - limits.items)
    cut: StageSection = bounded(replace(section, charts=(), rollouts=rollouts), limits, left_out)
    return replace(cut, charts=section.charts[: limits.items])


def _place(name: str) -> str:
    return f"#stage-{quoted(name)}"
