"""Logged rollouts as the pages show them."""

from __future__ import annotations

from rlhf_core.artifacts.logged_rollouts import LoggedSequence
from rlhf_core.report.rollouts import columns_of, tokens_of


def test_the_values_of_trained_tokens_stand_at_them() -> None:
    sequence = LoggedSequence(
        texts=("a", "b", "c"), token_ids=(1, 2, 3), trained=(False, True, True), engine_logprobs=(-1.0, -2.0),
        advantages=(0.5, None), values=(7.0, 8.0),
    )  # fmt: skip
    assert tokens_of(sequence) == [
        {"text": "a", "id": 1},
        {"text": "b", "id": 2, "engine": -1.0, "advantage": 0.5, "value": 7.0},
        {"text": "c", "id": 3, "engine": -2.0, "advantage": None, "value": 8.0},
    ]
    assert columns_of(tokens_of(sequence)) == {
        "text": ["a", "b", "c"], "id": [1, 2, 3], "engine": [None, -1.0, -2.0], "advantage": [None, 0.5, None],
        "value": [None, 7.0, 8.0],
    }  # fmt: skip
