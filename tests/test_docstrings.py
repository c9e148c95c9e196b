"""The docstrings of the packages begin as sentences."""

from __future__ import annotations

import ast

from tests.test_imports import ROOT, source_files

CLAUSES = ("Whether ", "What ", "Which ", "Who ", "Whose ", "How ", "Where ", "When ", "Why ")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_no_docstring_is_a_clause() -> None:
    """`Return whether …` for a function, `True if …` for a property, and a noun for the rest."""
    clauses = [
        f"{file.relative_to(ROOT)}: {text.splitlines()[0]}"
        for file in source_files()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node) or "").startswith(CLAUSES)
    ]
    assert clauses == []
