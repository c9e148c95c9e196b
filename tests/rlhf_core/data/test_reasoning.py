from __future__ import annotations

import json
from datetime import date
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from rlhf_core.data.formats import RowError, canonical_row
from rlhf_core.data.sources.reasoning import check_task, generate, json_safe, score
from rlhf_core.errors import RecipeError

pytestmark = pytest.mark.parts

# `composite` needs other tasks; the others take seconds for one item.
_SLOW = {"composite", "knight_swap", "rush_hour", "sudoku", "mini_sudoku"}


def test_rows_of_each_format() -> None:
    (text,) = generate("spell_backward", {}, size=1, seed=7, data_format="text")
    (talk,) = generate("spell_backward", {}, size=1, seed=7, data_format="conversations")
    (prompt,) = generate("spell_backward", {}, size=1, seed=7, data_format="prompts")
    word = prompt["metadata"]["word"]
    assert prompt["answer"] == talk["completion"] == word[::-1]
    assert text["text"] == f"{prompt['prompt']}\n{word[::-1]}"
    assert prompt["task"] == "spell_backward"


def test_item_i_is_made_from_seed_plus_i() -> None:
    first = list(generate("chain_sum", {"min_terms": 3}, size=3, seed=10, data_format="prompts"))
    later = list(generate("chain_sum", {"min_terms": 3}, size=2, seed=11, data_format="prompts"))
    assert [row["prompt"] for row in first[1:]] == [row["prompt"] for row in later]


@pytest.mark.parametrize("task", sorted(set(DATASETS) - _SLOW))
def test_a_stored_row_scores_as_the_task_itself_does(task: str) -> None:
    (raw,) = generate(task, {}, size=1, seed=5, data_format="prompts")
    row = json.loads(json.dumps(canonical_row(raw, "prompts", {}), allow_nan=False))
    assert score(task, row.get("answer"), row) == (1.0 if "answer" in row else 0.0)


def test_partial_credit_is_the_tasks_own() -> None:
    (raw,) = generate("spell_backward", {"min_word_len": 5, "max_word_len": 5}, size=1, seed=5, data_format="prompts")
    row = canonical_row(raw, "prompts", {})
    assert 0 < score("spell_backward", row["answer"][:-1] + "#", row) < 1


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("spel_backward", {}, "no task `spel_backward` (did you mean `spell_backward`?)"),
        ("zzzz", {}, "no task `zzzz`; there are ab, "),
        ("spell_backward", {"min_word": 3}, "has no option `min_word` (did you mean `min_word_len`?)"),
        ("spell_backward", {"seed": 3}, "`seed` belongs to the source"),
        ("spell_backward", {"min_word_len": 9, "max_word_len": 3}, "refuses its options"),
        ("chain_sum", {"min_terms": 2.5}, "`min_terms` is 2.5, which is of another type than its default, 2"),
        ("chain_sum", {"max_terms": None}, "`max_terms` is null, which is of another type than its default, 6"),
    ],
)
def test_wrong_tasks_and_options(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        check_task(task, options)
    assert message in str(raised.value)


def test_options_that_make_no_item_are_named() -> None:
    no_word = {"min_word_len": 60, "max_word_len": 70}
    with pytest.raises(RecipeError, match="reasoning_gym task `spell_backward` makes no item 0 of its options"):
        list(generate("spell_backward", no_word, size=1, seed=0, data_format="text"))


def test_formats_that_a_task_cannot_serve() -> None:
    with pytest.raises(RowError, match="no single right answer"):
        list(generate("rubiks_cube", {}, size=1, seed=0, data_format="text"))
    with pytest.raises(RecipeError, match="has no preferences"):
        list(generate("chain_sum", {}, size=1, seed=0, data_format="preferences"))


def test_json_safe() -> None:
    value = {1: (2, np.int64(3)), "s": {2, 1}, "a": np.eye(1), "f": Fraction(1, 2), "d": date(2020, 1, 2), "n": None}
    assert json_safe(value) == {"1": [2, 3], "s": [1, 2], "a": [[1.0]], "f": "1/2", "d": "2020-01-02", "n": None}
