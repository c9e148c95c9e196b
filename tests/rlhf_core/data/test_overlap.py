from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.data.formats import Rows, canonical_row, format_of
from rlhf_core.data.overlap import PromptIndex, overlap_problem


def row(data_format: str, **source: Any) -> dict[str, Any]:
    return canonical_row(source, data_format, {})


PROMPTS, TEXT = format_of("prompts"), format_of("text")


def prompts(*asked: str) -> Rows:
    return Rows(PROMPTS, [row("prompts", prompt=prompt) for prompt in asked])


HELD_OUT = PromptIndex({"test": prompts("What is 1 + 2?", "Say  1 +\n22")})


@pytest.mark.parametrize(
    ("data_format", "candidate", "excluded"),
    [
        ("prompts", row("prompts", prompt="What is  1 + 2?\n"), True),
        ("prompts", row("prompts", prompt="What is 1 + 2? Now."), False),
        (
            "prompts",
            row(
                "prompts",
                prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 1 + 22"}],
            ),
            True,
        ),
        ("conversations", row("conversations", prompt="What is 1 + 2?", completion="3"), True),
        ("conversations", row("conversations", prompt="Hm", completion="What is 1 + 2?"), False),
        (
            "conversations",
            row(
                "conversations",
                messages=[
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hi"},
                    {"role": "user", "content": "Say 1 + 22"},
                    {"role": "assistant", "content": "1 + 22"},
                ],
            ),
            True,
        ),
        ("preferences", row("preferences", prompt="Say 1 + 22", chosen="a", rejected="b"), True),
        ("text", row("text", text="Q: What is 1 + 2?\n3"), True),
        ("text", row("text", text="Say 1 + 22"), True),
        ("text", row("text", text="Say 1 + 223"), False),  # another number
        ("text", row("text", text="xSay 1 + 22"), False),
        ("text", row("text", text="short"), False),
    ],
)
def test_what_repeats_a_held_out_prompt(data_format: str, candidate: dict[str, Any], excluded: bool) -> None:
    assert (HELD_OUT.find(candidate, format_of(data_format)) is not None) is excluded


def test_a_column_that_another_format_reads_changes_nothing() -> None:
    """The formats say what their rows ask, not the names of their columns."""
    beside = row("prompts", prompt="What is 1 + 2?", text="Something else", messages=[])
    assert HELD_OUT.find(beside, PROMPTS) == ("test", "What is 1 + 2?")
    assert PromptIndex({"a": Rows(PROMPTS, [beside])}).prompts == ["What is 1 + 2?"]


def test_nothing_is_excluded_by_nothing() -> None:
    assert PromptIndex({}).find(row("text", text="a"), TEXT) is None


def test_a_prompt_in_a_text_is_found_whatever_else_begins_like_it() -> None:
    """Prompts of many lengths with a common beginning, one that is a single sign, one in a script without spaces."""
    asked = [f"Spell this word backward: {'ab' * n}" for n in range(1, 9)] + ["?", "東京は晴れですか"]
    index = PromptIndex({"a": prompts(asked[0]), "b": prompts(*asked)})
    assert index.find(row("text", text="Now. Spell  this word\nbackward: abab, now"), TEXT) == ("b", asked[1])
    assert index.find(row("text", text="Spell this word backward: ab"), TEXT) == ("a", asked[0])
    assert index.find(row("text", text="Spell this word backward: abc"), TEXT) is None
    assert index.find(row("text", text="Is it so?"), TEXT) == ("b", "?")
    assert index.find(row("text", text="「東京は晴れですか」"), TEXT) == ("b", "東京は晴れですか")


def test_the_sentence_of_an_overlap_that_is_known_before_anything_runs() -> None:
    rows = [(f"d.jsonl line {i}", row("prompts", prompt=f"q{i}")) for i in range(1, 8)]
    held_out = {"test": prompts("q2", "q3", "q5", "q6")}
    excluded = {"test2": prompts("q3")}
    assert overlap_problem(rows, PROMPTS, held_out, excluded) == (
        "3 of 7 rows contain a prompt of a dataset that the recipe evaluates or validates on: "
        "d.jsonl line 2 contains 'q2' of `test`; d.jsonl line 5 contains 'q5' of `test`; "
        "d.jsonl line 6 contains 'q6' of `test`. "
        "Name that dataset in `exclude` to leave these rows out, or set on_overlap to `allow` to train on them"
    )
    assert overlap_problem(rows, PROMPTS, held_out, held_out) is None
    assert overlap_problem(rows, PROMPTS, {}, {}) is None
