"""The faults that `make mutants` plants can be planted, and the tests that are to find them exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant, judge, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_can_be_planted(name: str) -> None:
    mutant = MUTANTS[name]
    ast.parse(mutant.planted((ROOT / mutant.file).read_text(encoding="utf-8")))
    for test in mutant.tests:
        file, *names = test.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert set(names) <= defined


def test_there_are_forty_promises() -> None:
    assert len({mutant.promise for mutant in MUTANTS.values()}) == len(MUTANTS) >= 40


@pytest.mark.parts
@pytest.mark.parametrize(("added", "found_by"), [(2, "test_sums.py::test_add"), (0, "")])
def test_a_fault_is_found_by_a_test_that_fails(tmp_path: Path, added: int, found_by: str) -> None:
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    test = f"from sums import add\n\ndef test_add():\n    assert add(1, {added}) == {1 + added}\n"
    (tmp_path / "test_sums.py").write_text(test)
    mutant = Mutant("It adds.", "sums.py", "a + b", "a - b", ["test_sums.py"])
    assert judge(mutant, tmp_path).found_by == found_by
    assert (tmp_path / "sums.py").read_text() == "def add(a, b):\n    return a + b\n"
