"""Rows of RewardBench and RewardBench 2, as their data sets have them."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.data.formats.base import RowError
from rlhf_core.data.formats.reward_bench import RewardBench

FIRST = {"prompt": "2 + 2?", "chosen": "4", "chosen_model": "a", "rejected": "5", "rejected_model": "b",
         "subset": "math-prm", "id": 7}  # fmt: skip
SECOND = {"id": "0", "prompt": "2 + 2?", "chosen": ["4", "four"], "rejected": ["5", "3", "22"], "num_correct": 2,
          "num_incorrect": 3, "total_completions": 5, "subset": "Ties"}  # fmt: skip
ASKED = [{"role": "user", "content": "2 + 2?"}]


def canonical(**row: Any) -> dict[str, Any]:
    return RewardBench().canonical(row)


def test_a_row_of_either_has_its_chosen_completions_first() -> None:
    assert canonical(**FIRST) == {
        "prompt": ASKED, "completions": [{"text": "4"}, {"text": "5"}], "chosen": 1, "subset": "math-prm",
    }  # fmt: skip
    texts = [{"text": text} for text in ("4", "four", "5", "3", "22")]
    assert canonical(**SECOND) == {"prompt": ASKED, "completions": texts, "chosen": 2, "subset": "Ties"}


def test_conversations_and_rows_without_a_subset_are_read() -> None:
    chosen, rejected = ([*ASKED, {"role": "assistant", "content": text}] for text in "45")
    row = canonical(chosen=chosen, rejected=rejected)
    assert row == {"prompt": ASKED, "completions": [{"text": "4"}, {"text": "5"}], "chosen": 1, "subset": "all"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejected": ["3", "4 "]}, "a completion is in `chosen` and in `rejected`"),
        ({"rejected": []}, "`rejected` has no completion"),
        ({"chosen": None}, "no column `chosen`"),
        ({"subset": " "}, "`subset` is empty"),
        ({"chosen": [{"role": "user", "content": "3 + 1?"}, {"role": "assistant", "content": "4"}]}, "`prompt`"),
    ],
)
def test_a_row_that_ranks_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        canonical(**{**FIRST, **changes})
