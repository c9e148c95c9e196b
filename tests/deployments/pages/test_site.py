"""The documentation's site: every page is in it, and it builds strictly and loads nothing from other hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from deployments.pages.site import slug, without_links_out

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: Any = YAML(typ="safe", pure=True).load(ROOT / "mkdocs.yml")
MKDOCS = ROOT / ".venv-docs/bin/python"  # of `make docs`


def in_nav(entries: Any) -> Iterator[str]:
    for entry in entries:
        (target,) = entry.values()
        yield from [target] if isinstance(target, str) else in_nav(target)


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    left_out = SETTINGS["not_in_nav"].split()
    assert {page for page in pages if not any(fnmatch(f"/{page}", pattern) for pattern in left_out)} == {
        *in_nav(SETTINGS["nav"])
    }


def test_anchors_are_those_of_github() -> None:
    assert slug("`--json`, and Ray's jobs", "-") == "--json-and-rays-jobs"


def test_links_out_of_the_documentation_become_text() -> None:
    page = (
        "[`grpo.py`](../../examples/grpo.py), [the changelog](../../CHANGELOG.md), [models](../reference/models.md#a)"
    )
    assert without_links_out(page, "guides/python.md") == (
        "`grpo.py`, the changelog (`CHANGELOG.md`), [models](../reference/models.md#a)"
    )


def test_links_to_nothing_stay_for_the_strict_build() -> None:
    for page in ("[a](../../examples/none.py)", "[a](https://example.org/README.md)", "![a](../README.md)", "[a](#b)"):
        assert without_links_out(page, "guides/python.md") == page


@pytest.mark.endurance("architectures")
@pytest.mark.slow("builds the site")
@pytest.mark.skipif(
    not MKDOCS.exists() and importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: run make docs"
)
def test_the_site_builds_strictly_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    python = sys.executable if importlib.util.find_spec("mkdocs") else str(MKDOCS)
    subprocess.run(
        [python, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True,
    )  # fmt: skip
    pages = [*(tmp_path / "site").rglob("*.html")]
    assert len(pages) > 50
    loaded = re.compile(r"""<(?:script|img|iframe)[^>]* src=["']?(?:https?:)?//|<link[^>]* href=["']?(?:https?:)?//""")
    assert [str(page) for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []
