"""The templates of the pages. Drawing is in pictures.py, whose libraries take half a second to load."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from rlhf_core.report.formatting import compared_metrics, number, visible


def environment() -> Environment:
    """Return the environment of the page templates, which escape all inserted text."""
    templates = Environment(loader=PackageLoader("rlhf_core.report"), autoescape=True, undefined=StrictUndefined)
    templates.filters |= {"number": number, "visible": visible, "compared_metrics": compared_metrics}
    return templates
