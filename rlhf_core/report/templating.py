"""The templates of the pages, of the report and of `alignment ui`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlhf_core.errors import shortened
from rlhf_core.report.formatting import compared_metrics, duration, ending, energy, hours, main_metrics, number, visible

_LONGEST_CELL = 300  # characters
_BOKEH = ("bokeh.min.js", "bokeh-api.min.js")  # in the order in which they load
STANDALONE_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def environment(*packages: str) -> Environment:
    """Return the environment of the page templates, which escape all inserted text. packages: with more templates."""
    loaders = [PackageLoader(package) for package in (*packages, "rlhf_core.report")]
    templates = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )  # fmt: skip
    templates.filters |= {
        "number": number, "visible": visible, "compared_metrics": compared_metrics, "duration": duration,
        "ending": ending, "hours": hours, "energy": energy, "metrics": main_metrics, "url": quoted, "shortened": _cell,
    }  # fmt: skip
    return templates


def _cell(text: str) -> str:
    return shortened(text, _LONGEST_CELL)


def quoted(text: str) -> str:
    return quote(text, safe="")


def asset(name: str) -> str:
    """Return a style sheet or script of the pages."""
    return (files("rlhf_core.report") / "templates" / name).read_text(encoding="utf-8")


def bokeh() -> str:
    """Return the JavaScript of BokehJS. Its package is not imported: that takes a quarter of a second."""
    package = find_spec("bokeh")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "server" / "static" / "js"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in _BOKEH)


def standalone(template: str, context: Mapping[str, Any], *scripts: str) -> str:
    """Render a page that is one file: with its style and these scripts, and a policy that lets it load nothing.

    The scripts run by their hashes alone, so text of a model runs none, whatever it has.
    """
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes) or "'none'"
    return (
        environment()
        .get_template(template)
        .render(
            **context,
            policy=STANDALONE_POLICY.format(scripts=allowed),
            style=Markup(asset("page.css")),  # noqa: S704
            scripts=[Markup(script) for script in scripts],  # noqa: S704
        )
    )
