"""The templates of the pages. Drawing is in pictures.py, whose libraries take half a second to load."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from rlhf_core.report.formatting import compared_metrics, number, visible


def environment() -> Environment:
    """Of the templates. Escapes all text that they insert."""
    made = Environment(loader=PackageLoader("rlhf_core.report"), autoescape=True, undefined=StrictUndefined)
    made.filters |= {"number": number, "visible": visible, "compared_metrics": compared_metrics}
    return made
