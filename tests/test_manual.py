"""The manual stays short, and the settings that it names exist."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from rlhf_core.recipe.language import keys_of
from rlhf_core.recipe.settings_page import config_places

pytestmark = pytest.mark.parts

DOCS = Path(__file__).parents[1] / "docs"
SHELVES = ("tutorials", "guides", "operate", "design")
NOT_READ_THROUGH = ("reference/", "lab/", "design/decisions/")
MOST_WORDS = 25_000
# Of nodes, of files of a run, of rows, of verl, and of Harbor.
NO_SETTINGS = {
    "merge.sft", "evaluation.rl", "reward_model.ground_truth", "rollout.gpu_memory_utilization",
    "environment.docker_image", "environment.env",
}  # fmt: skip
FILES = (".html", ".json", ".jsonl")


def test_the_manual_has_at_most_25_000_words() -> None:
    """All pages but the reference, and the records: the decisions and the lab."""
    pages = [page for page in DOCS.rglob("*.md") if not page.relative_to(DOCS).as_posix().startswith(NOT_READ_THROUGH)]
    words = {page.relative_to(DOCS).as_posix(): len(page.read_text("utf-8").split()) for page in pages}
    assert {page.partition("/")[0] for page in words} == {*SHELVES, "README.md"}
    assert sum(words.values()) <= MOST_WORDS, words


def test_every_setting_that_a_page_names_exists() -> None:
    """`rl.rollout.max_length`, or a part of it, such as `rollout.max_length`."""
    keys_below, named_freely = defaultdict(set), set()
    for config, where in config_places().items():
        for place in where:
            *_, parent, last = ["", "", *place.split(".")]
            keys_below[parent if last == "*" else last] |= set(keys_of(config))
            named_freely |= {parent} if last == "*" else set()
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    pages += [page for shelf in (*SHELVES, "reference") for page in (DOCS / shelf).glob("*.md")]
    names = {
        (name, page.relative_to(DOCS.parent).as_posix())
        for page in pages
        for name in re.findall(r"`([a-z_+]+(?:\.[a-z_+]+)+)(?:[:=][^`]*)?`", page.read_text("utf-8"))
        if name.partition(".")[0] in keys_below and not name.endswith(FILES) and name not in NO_SETTINGS
    }
    assert len(names) > 100
    unknown = [
        (page, name)
        for name, page in sorted(names)
        for parent, key in zip(name.split("."), name.split(".")[1:], strict=False)
        if parent in keys_below and parent not in named_freely and key not in keys_below[parent]
    ]
    assert unknown == []
