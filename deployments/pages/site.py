"""Hooks of mkdocs, so that the site reads the pages as GitHub does. mkdocs.yml names this file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def slug(heading: str, _separator: str = "-") -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def without_links_out(markdown: str, page: str) -> str:
    """Replace links to files of the repository outside of docs/, which the site lacks, by their text.

    A link to nothing is kept, so that a strict build fails. `page` is the page's path in docs/.
    """

    def replace(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = normpath(join("docs", dirname(page), target))
        outside = ":" not in target and not path.startswith("docs/") and (ROOT / path).exists()
        return (text if text.startswith("`") else f"{text} (`{path}`)") if outside else found[0]

    return _LINK.sub(replace, markdown)


def on_config(config: Any) -> Any:
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Mapping[str, Any]) -> str:
    return without_links_out(markdown, page.file.src_uri)
