"""The report as one self-contained HTML page."""

from __future__ import annotations

from markupsafe import Markup

from rlhf_core.report.content import Content
from rlhf_core.report.pictures import curve_grid, lineage, phase_bars
from rlhf_core.report.templating import environment


def render(content: Content, *, title: str, revision: str, libraries: dict[str, str]) -> str:
    """Render the page. Escapes all text from models and data; only the pictures drawn here are inserted unescaped."""
    return (
        environment()
        .get_template("report.html")
        .render(
            content=content,
            title=title,
            seeds=sorted({stage.seed for stage in content.stages if stage.seed is not None}),
            revision=revision,
            libraries=libraries,
            pictures={name: Markup(curve_grid(curves)) for name, curves in content.curves.items()},  # noqa: S704
            phases={name: Markup(phase_bars(curves)) for name, curves in content.curves.items()},  # noqa: S704
            lineage=Markup(lineage(content.edges)) if content.edges else "",  # noqa: S704
            total_seconds=sum(stage.seconds for stage in content.stages),
            total_device_seconds=sum(stage.device_seconds for stage in content.stages),
        )
    )
