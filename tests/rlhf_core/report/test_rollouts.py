"""Logged rollouts as the pages show them."""

from __future__ import annotations

from rlhf_core.artifacts.logged_rollouts import LoggedCompletion, LoggedSequence
from rlhf_core.report.rollouts import columns_of, reward_sum, tokens_of


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


def test_the_terms_of_a_reward_add_up_to_its_total() -> None:
    completion = LoggedCompletion(
        text="4", finish_reason="stop", turns=1, reward=0.7, rewards={"exact": 1.0, "length": 0.0, "style": 0.5},
        weighted={"exact": 0.6, "length": 0.0, "style": 0.2}, details={"style/met": 1.0}, versions=(), sequences=(),
    )  # fmt: skip
    found = reward_sum(completion)
    assert [(each.name, each.value, each.weight, each.contribution) for each in found.terms] == [
        ("exact", 1.0, 0.6, 0.6), ("length", 0.0, None, 0.0), ("style", 0.5, 0.4, 0.2),
    ]  # fmt: skip
    assert (found.shaping, found.total, found.is_weighted) == (-0.1, 0.7, True)
    old = reward_sum(completion.model_copy(update={"weighted": {}, "details": {}}))
    assert (old.shaping, old.total, old.is_weighted) == (None, 0.7, False)
