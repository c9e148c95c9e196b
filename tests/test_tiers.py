"""The tiers of tests: what marks a file, and what a unit test may not do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import SLOW, stored
from tests.tiers import PARTS_OF_ENDURANCE, TIERS, tier_of_file

TESTS = Path(__file__).parent


def test_every_tier_is_a_marker(pytestconfig: pytest.Config) -> None:
    declared = {re.match(r"\w+", line)[0] for line in pytestconfig.getini("markers")}  # type: ignore[index]
    assert declared.issuperset(TIERS)


@pytest.mark.parametrize(
    ("source", "tier"),
    [
        ("import pytest\n", "unit"),
        ("pytestmark = pytest.mark.parts\n", "parts"),
        ("pytestmark = [pytest.mark.system, pytest.mark.slow('x')]\n", "system"),
        ("pytestmark = [\n    pytest.mark.endurance('chaos'),\n    pytest.mark.slow('x'),\n]\n", "endurance"),
        ("@pytest.mark.parts\ndef test_one() -> None: ...\n", "unit"),
    ],
)
def test_the_tier_of_a_file_is_read_from_its_source(source: str, tier: str, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(source)
    assert tier_of_file(tmp_path / "test_x.py") == tier


def test_each_part_of_endurance_has_tests_and_is_run_by_ci() -> None:
    named = re.findall(r'pytest\.mark\.endurance\("([\w-]+)"\)', "".join(map(Path.read_text, TESTS.rglob("test_*.py"))))
    assert {*named} == {*PARTS_OF_ENDURANCE}
    ci = (TESTS.parent / ".ci" / "run").read_text(encoding="utf-8")
    assert f"parts=({' '.join(PARTS_OF_ENDURANCE)})" in ci


def test_a_unit_test_starts_no_process() -> None:
    with pytest.raises(
        AssertionError, match=r"test_a_unit_test_starts_no_process starts a process \(subprocess.Popen\)"
    ):
        subprocess.run([sys.executable, "-c", ""], check=True)


def test_a_slow_test_has_a_reason() -> None:
    slow = [test for test, seconds in stored().items() if "::" in test and seconds > SLOW]
    assert [test for test in slow if not _has_a_reason(test)] == []


def _has_a_reason(test: str) -> bool:
    """True if `@pytest.mark.slow("…")` stands at the test, its class or its file."""
    path, *names = test.partition("[")[0].split("::")
    tree = ast.parse((TESTS.parent / path).read_text(encoding="utf-8"))
    marks = [
        mark
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
        for mark in node.decorator_list
    ]
    marks += [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return any("pytest.mark.slow(" in ast.unparse(mark) for mark in marks)
