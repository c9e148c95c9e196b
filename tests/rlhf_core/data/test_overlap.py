from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config.data import DataFormat
from rlhf_core.data.formats import canonical_row
from rlhf_core.data.overlap import PromptIndex, overlap_problem


def row(data_format: DataFormat, **source: Any) -> dict[str, Any]:
    return canonical_row(source, data_format, {})


HELD_OUT = PromptIndex({"test": [row("prompts", prompt="What is 1 + 2?"), row("prompts", prompt="Say  1 +\n22")]})


@pytest.mark.parametrize(
    ("candidate", "excluded"),
    [
        (row("prompts", prompt="What is  1 + 2?\n"), True),
        (row("prompts", prompt="What is 1 + 2? Now."), False),
        (
            row(
                "prompts",
                prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 1 + 22"}],
            ),
            True,
        ),
        (row("conversations", prompt="What is 1 + 2?", completion="3"), True),
        (row("conversations", prompt="Hm", completion="What is 1 + 2?"), False),
        (
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
        (row("preferences", prompt="Say 1 + 22", chosen="a", rejected="b"), True),
        (row("text", text="Q: What is 1 + 2?\n3"), True),
        (row("text", text="Say 1 + 22"), True),
        (row("text", text="Say 1 + 223"), False),  # another number
        (row("text", text="xSay 1 + 22"), False),
        (row("text", text="short"), False),
    ],
)
def test_what_repeats_a_held_out_prompt(candidate: dict[str, Any], excluded: bool) -> None:
    assert (HELD_OUT.find(candidate) is not None) is excluded


def test_nothing_is_excluded_by_nothing() -> None:
    assert PromptIndex({}).find(row("text", text="a")) is None


def test_a_prompt_in_a_text_is_found_whatever_else_begins_like_it() -> None:
    """Prompts of many lengths with a common beginning, one that is a single sign, one in a script without spaces."""
    prompts = [f"Spell this word backward: {'ab' * n}" for n in range(1, 9)] + ["?", "東京は晴れですか"]
    index = PromptIndex({"a": [row("prompts", prompt=prompts[0])], "b": [row("prompts", prompt=p) for p in prompts]})
    assert index.find(row("text", text="Now. Spell  this word\nbackward: abab, now")) == ("b", prompts[1])
    assert index.find(row("text", text="Spell this word backward: ab")) == ("a", prompts[0])
    assert index.find(row("text", text="Spell this word backward: abc")) is None
    assert index.find(row("text", text="Is it so?")) == ("b", "?")
    assert index.find(row("text", text="「東京は晴れですか」")) == ("b", "東京は晴れですか")


def test_the_sentence_of_an_overlap_that_is_known_before_anything_runs() -> None:
    rows = [(f"d.jsonl line {i}", row("prompts", prompt=f"q{i}")) for i in range(1, 8)]
    held_out = {"test": [row("prompts", prompt=f"q{i}") for i in (2, 3, 5, 6)]}
    excluded = {"test2": [row("prompts", prompt="q3")]}
    assert overlap_problem(rows, held_out, excluded) == (
        "3 of 7 rows contain a prompt of a dataset that the recipe evaluates or validates on: "
        "d.jsonl line 2 contains 'q2' of `test`; d.jsonl line 5 contains 'q5' of `test`; "
        "d.jsonl line 6 contains 'q6' of `test`. "
        "Name that dataset in `exclude` to leave these rows out, or set on_overlap to `allow` to train on them"
    )
    assert overlap_problem(rows, held_out, held_out) is None
    assert overlap_problem(rows, {}, {}) is None
