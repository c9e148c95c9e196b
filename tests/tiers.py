"""The four tiers of tests: `pytestmark = pytest.mark.parts` names that of a file; without a mark it is `unit`.

`unit` is pure and starts no process; `parts` has one process with torch, DeepSpeed, an engine or an S3 server; `system`
has Ray, Prefect, several ranks or the local stack; `endurance` is left to a night, in six parts.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TIERS = ("unit", "parts", "system", "endurance")
PARTS_OF_ENDURANCE = ("architectures", "benchmarks", "chaos", "mutations", "rl-matrix", "two-nodes")

_NAMED = re.compile(
    r"^pytestmark = \[?\s*pytest\.mark\.(" + "|".join(TIERS) + r")\b", re.MULTILINE
)  # first, if in a list
_PROCESS_STARTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"})
_unit_test: str | None = None  # the one that runs


def tier_of_file(file: Path) -> str:
    """Read from the source, so that files of other tiers need not be imported."""
    named = _NAMED.search(file.read_text(encoding="utf-8"))
    return named[1] if named else "unit"


def tier_of(item: pytest.Item) -> str:
    return next((mark.name for mark in item.iter_markers() if mark.name in TIERS), "unit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS_OF_ENDURANCE, help="run only this part of the tier `endurance`")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of other tiers import torch, Ray and vLLM, which takes longer than all unit tests."""
    if not collection_path.name.startswith("test_"):
        return None
    tier = tier_of_file(collection_path)
    others = {"unit": tier != "unit", "not endurance": tier == "endurance"}
    return others.get(config.option.markexpr) or None


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if tier_of(item) == "unit":
            item.add_marker("unit")
    if part := config.option.part:
        chosen = [item for item in items if _part_of(item) == part]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _part_of(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("endurance")
    return mark.args[0] if mark else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """A unit test that starts a process fails, whatever tier its author had in mind."""
    global _unit_test
    _refuse_processes()
    _unit_test = item.nodeid if tier_of(item) == "unit" else None
    try:
        return (yield)
    finally:
        _unit_test = None


@cache  # an audit hook cannot be removed
def _refuse_processes() -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if _unit_test and event in _PROCESS_STARTS:
            raise AssertionError(f"{_unit_test} starts a process ({event}): mark it `parts` or `system`")

    sys.addaudithook(audit)
