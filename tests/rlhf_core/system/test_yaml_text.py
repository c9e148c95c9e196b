"""YAML as plain values, or one sentence with the line."""

from __future__ import annotations

import re
import string
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.system.yaml_text import MAX_BYTES, YAMLTextError, read_yaml, read_yaml_file
from tests.rlhf_core.recipe_text import RECIPE

LAUGHS = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
MERGED_LAUGHS = LAUGHS.replace("[", "{<<: [").replace("]", "]}")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a: 1e-4", {"a": 1e-4}),
        ("%YAML 1.2\n---\na: 010", {"a": 10}),
        ("a: no", {"a": "no"}),
        ("a: 1:30", {"a": "1:30"}),
        ("a: 010", {"a": 10}),
        ("a: 2024-01-01\nb: 2024-01-01 10:00:00", {"a": "2024-01-01", "b": "2024-01-01 10:00:00"}),
        ("2024-01-01: x", {"2024-01-01": "x"}),
        ("\ufeffa: ~", {"a": None}),
        ("", None),
        (
            "a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\ne: {<<: [{c: 4}, *x]}",
            {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}, "e": {"b": 1, "c": 4}},
        ),
        ("&x a: &x b", {"a": "b"}),
        (r'a: "\\u0000"', {"a": r"\u0000"}),
        (r'{"a": "\ud83d\ude00"}', {"a": "\U0001f600"}),  # as JSON is written in ASCII
    ],
)  # fmt: skip
def test_plain_values(text: str, values: Any) -> None:
    assert read_yaml(text) == values


def test_each_place_has_its_own_copy_of_what_an_alias_repeats() -> None:
    values = read_yaml("a: &x {b: 1}\nc: *x")
    values["a"]["b"] = 2
    assert values["c"] == {"b": 1}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# a\n%YAML 1.1\n---\na: 010", "the directive `%YAML 1.1` is not read: recipes are YAML 1.2"),
        ("%TAG ! !b\n---\na: 1", "the directive `%TAG ! !b` is not read: recipes are YAML 1.2"),
        ("b: 1\na: 2\na: 3", "line 3: not valid YAML: the key stands twice in one mapping: remove one (found"),
        ("<<: {a: 1}\nb: 1\nb: 2", "line 3: not valid YAML: the key stands twice in one mapping: remove one"),
        ("a:\n  1: x", "line 2: not valid YAML: a key must be text: put it in quotes"),
        (": x", "line 1: not valid YAML: a key must be text: put it in quotes"),
        ("? [a]\n: x", "line 1: not valid YAML: a key must be text: put it in quotes"),
        ("a: 1\nb: .inf", "Infinity is not valid JSON: write a number, or null"),
        ("a: 1e999", "Infinity is not valid JSON: write a number, or null"),
        ("a: " + "9" * 5000, "not valid YAML: Exceeds the limit (4300 digits) for integer string conversion"),
        ("a: !!python/object/apply:os.system [ls]", "line 1: not valid YAML: this tag is not read here: write a plain"),
        ("a: !!binary aGk=", "Object of type bytes is not JSON serializable"),
        ("a: !!set {b}", "Object of type set is not JSON serializable"),
        ("a: !!bool perhaps", "not valid YAML: 'perhaps'"),
        ("a: 1\n\tb: 2", "line 2: not valid YAML: a tab stands where only spaces may: replace tabs by spaces"),
        ("a: 1\n---\na: 2", "line 2: not valid YAML: `---` begins a second document, but a recipe is one"),
        ("a: *nowhere", "line 1: not valid YAML: `*name` repeats what `&name` marks above; a text that begins"),
        ("a: *" + "x" * 9999, "needs quotes (found undefined alias 'xxxx"),
        ("a: 1\n  b: 2", "line 2: not valid YAML: `key: value` may not stand here: indent it as its neighbours"),
        ("a: 1\nb\nc: 2", "line 3: not valid YAML: a key in this line, or the one above, has no `: ` behind it"),
        ("a: 1\nb: [1,\nc: 2", "line 2: not valid YAML: a bracket is opened here and never closed"),
        ("a: 1\nb: 'x\nc: 2", "line 2: not valid YAML: a quote is opened here and never closed"),
        ("a: %x", "line 1: not valid YAML: a text that begins so needs quotes"),
        ("<<: {a: 1}\n<<: {b: 1}", "line 2: not valid YAML: the key stands twice in one mapping"),
        ("a: 1\nb: \0", "line 2: not valid YAML: the character U+0000 may not stand here: is the file UTF-16?"),
        ("<<: 1", "line 1: not valid YAML: `<<` takes a mapping, or a list of mappings"),
        ("a: &x [*x]", "Circular reference detected"),
        ("a: &x {<<: *x}", "lists and mappings too deep inside each other"),
        ("- " * 2000, "lists and mappings too deep inside each other"),
        ("a: \0", "not valid YAML: the character U+0000 may not stand here"),
        ('a: "\\0"', "a text holds a NUL character"),
        ('a: "\\ud800"', "a text holds half a surrogate pair"),
        ("a: \ud800", "not valid YAML: the character U+D800 may not stand here"),
    ],
)  # fmt: skip
def test_one_sentence_says_what_and_where(text: str, sentence: str) -> None:
    with pytest.raises(YAMLTextError) as raised:
        read_yaml(text)
    assert str(raised.value).startswith(sentence) or sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.endurance("mutations")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LAUGHS, "more than 1048576 characters, once every alias stands for what it repeats"),
        (
            f"a: &a {'x' * 100_000}\nb: [{'*a,' * 1000}]",
            "more than 1048576 characters, once every alias stands for what",
        ),
        (MERGED_LAUGHS, "line 6: not valid YAML: `<<` repeats more than 100000 values"),
    ],
    ids=["lists", "text", "merged"],
)
def test_a_bomb_of_aliases_takes_little_memory(text: str, sentence: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(YAMLTextError, match=re.escape(sentence)):
            read_yaml(text)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a: ü\nb: é".encode("latin-1"), "line 1: not UTF-8 text (invalid start byte): save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "line 1: not UTF-8 text (invalid start byte): save the file as UTF-8"),
        (
            b"#" * (MAX_BYTES + 1),
            "this file is larger than 262144 bytes, so it is not a recipe; name its data by paths",
        ),
    ],
)
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(YAMLTextError) as raised:
        read_yaml_file(path)
    assert str(raised.value) == sentence


PIECES = [
    *string.printable,
    "&a ",
    "*a ",
    "<<: ",
    "- ",
    "? ",
    "!!int ",
    "!!str ",
    "---\n",
    ".nan",
    "~: ",
    "\0",
    "\ud800",
    "\x85",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(RECIPE)), st.integers(0, 12), st.sampled_from(PIECES)), max_size=6))
def test_a_mutated_recipe_has_values_or_one_sentence(changes: list[tuple[int, int, str]]) -> None:
    text = RECIPE
    for start, length, piece in changes:
        text = text[:start] + piece + text[start + length :]
    assert "\n" not in said(text)


def said(text: str) -> str:
    """The sentence that refuses the text; empty if it has values."""
    try:
        read_yaml(text)
    except YAMLTextError as error:
        return str(error)
    return ""
