from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rlhf_core.data.formats import RowError, canonical_row, row_id
from rlhf_core.data.sampled import best_of, by_reward, comparisons, conditional, labelled, preferences, with_reward
from rlhf_core.errors import StageError

QUESTION = [{"role": "user", "content": "2+2?"}]


def row(*completions: tuple[str, float], **more: Any) -> dict[str, Any]:
    entries = [{"text": text, "reward": reward} for text, reward in completions]
    return {"id": "r", "prompt": QUESTION, "completions": entries, **more}


def sides(given: dict[str, Any], *, every: bool, margin: float = 0.0) -> tuple[list[tuple[str, str]], dict[str, int]]:
    counts: Counter[str] = Counter()
    compared = list(comparisons(given, every=every, counts=counts))
    found = list(preferences(compared, [by_reward(pair, margin) for pair in compared], counts))
    for pair in found:
        assert pair["prompt"] == QUESTION
        assert pair["id"] == row_id({name: value for name, value in pair.items() if name != "id"})
    return [(pair["chosen"], pair["rejected"]) for pair in found], {k: v for k, v in counts.items() if v}


def test_the_best_and_the_worst() -> None:
    given = row(("a", 0.5), ("b", 1.0), ("c", 0.0), ("d", 1.0), ("e", 0.0))
    assert sides(given, every=False) == ([("b", "c")], {})


def test_all_pairs() -> None:
    found, counts = sides(row(("a", 0.5), ("b", 1.0), ("c", 0.5)), every=True)
    assert found == [("b", "a"), ("b", "c")]
    assert counts == {"ties": 1}


@pytest.mark.parametrize(("margin", "expected"), [(0.4, [("b", "a")]), (0.5, [])])
def test_a_margin_must_be_exceeded(margin: float, expected: list[tuple[str, str]]) -> None:
    found, counts = sides(row(("a", 0.5), ("b", 1.0)), every=False, margin=margin)
    assert found == expected
    assert counts == ({} if expected else {"ties": 1})


def test_pairs_keep_how_far_their_rewards_are_apart() -> None:
    compared = list(comparisons(row(("a", 0.5), ("b", 2.0), ("c", -1.0)), every=True, counts=Counter()))
    outcomes = [by_reward(pair, 0.0) for pair in compared]
    found = list(preferences(compared, outcomes, Counter(), margin=True))
    assert [(pair["chosen"], pair["rejected"], pair["margin"]) for pair in found] == [
        ("b", "a", 1.5), ("a", "c", 1.5), ("b", "c", 3.0)
    ]  # fmt: skip
    assert all(canonical_row(pair, "preferences", {})["margin"] == pair["margin"] for pair in found)
    assert "margin" not in next(iter(preferences(compared, outcomes, Counter())))


def test_equal_and_empty_texts_make_no_pair() -> None:
    found, counts = sides(row(("a", 0.0), ("a ", 1.0), (" \n", 2.0)), every=False)
    assert found == []
    assert counts == {"equal_completions": 1, "empty_completions": 1}


def test_tools_stay_with_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    compared = list(comparisons(row(("a", 0.0), ("b", 1.0), tools=tools), every=False, counts=Counter()))
    (pair,) = preferences(compared, ["other"], Counter())
    assert pair["tools"] == tools


@pytest.mark.parametrize(
    ("margin", "labels", "near"),
    [
        (0.0, {"a": False, "b": True, "c": True}, 0),
        (0.5, {"a": False, "c": True}, 1),
        (0.75, {}, 3),
    ],
)
def test_rewards_become_labels(margin: float, labels: dict[str, bool], near: int) -> None:
    counts: Counter[str] = Counter()
    given = row(("a", 0.0), ("b", 0.5), ("b ", 1.0), ("c", 1.0), ("", 1.0))
    found = list(labelled(given, threshold=0.5, margin=margin, counts=counts))
    assert {made["completion"]: made["label"] for made in found} == labels
    assert [canonical_row(made, "unpaired", {}) for made in found] == found
    assert (counts["near_threshold"], counts["equal_completions"], counts["empty_completions"]) == (near, 1, 1)
    assert counts["desirable"] + counts["undesirable"] == len(labels)


def test_the_best_of_n() -> None:
    counts: Counter[str] = Counter()
    (found,) = best_of(row(("a", 0.5), ("b", 1.0), ("c", 1.0)), least_reward=1.0, counts=counts)
    assert found["messages"] == [*QUESTION, {"role": "assistant", "content": "b"}]
    assert list(best_of(row(("a", 0.5)), least_reward=0.6, counts=counts)) == []
    assert list(best_of(row((" ", 1.0)), least_reward=None, counts=counts)) == []
    assert counts == {"prompts_left_out": 2, "empty_completions": 1}


def test_a_completion_without_a_reward_is_an_error() -> None:
    given = {"id": "r7", "prompt": QUESTION, "completions": [{"text": "a"}]}
    with pytest.raises(StageError, match="row r7 has a completion without `reward`"):
        list(best_of(given, least_reward=None, counts=Counter()))


@pytest.mark.parametrize(
    ("completions", "expected"),
    [
        (["a", "b"], [{"text": "a"}, {"text": "b"}]),
        ([{"text": "a", "reward": "0.5", "other": 1}], [{"text": "a", "reward": 0.5}]),
        ([{"text": "", "logprob": -1, "rewards": {"x": 1}}], [{"text": "", "logprob": -1.0, "rewards": {"x": 1.0}}]),
    ],
)
def test_completions_as_files_have_them(completions: Any, expected: Any) -> None:
    made = canonical_row({"prompt": "2+2?", "completions": completions}, "completions", {})
    assert made["completions"] == expected
    assert made["prompt"] == QUESTION


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        (None, "`completions` is null"),
        ([], "must be a list with at least one completion"),
        ("a", "must be a list with at least one completion"),
        ([{"reward": 1}], r"`completions\[0\]` must be text, or a mapping with `text`"),
        (["a", {"text": "b", "reward": "much"}], r"`completions\[1\]\.reward` must be a number"),
        ([{"text": "b", "rewards": [1]}], r"`completions\[0\]\.rewards` must be a mapping"),
        ([{"text": "b", "reward": float("nan")}], r"`completions\[0\]\.reward` must be a number"),
    ],
)
def test_completions_that_are_none(completions: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        canonical_row({"prompt": "2+2?", "completions": completions}, "completions", {})


def test_each_completion_is_told_its_reward() -> None:
    counts: Counter[str] = Counter()
    written: Counter[str] = Counter()
    given = row(("a", 1.0), ("b", -0.01), ("b", 0.5), ("c", 1.04))
    made = list(conditional(given, text=" [{reward}]", decimals=1, counts=counts, written=written))
    told = [tuple(message["content"] for message in conversation["messages"]) for conversation in made]
    assert told == [("2+2? [1.0]", "a"), ("2+2? [0.0]", "b"), ("2+2? [1.0]", "c")]
    assert written == {"1.0": 2, "0.0": 1}
    assert counts == {"equal_completions": 1}
    assert len({conversation["id"] for conversation in made}) == 3


def test_a_reward_is_asked_for_behind_the_last_message_of_the_user() -> None:
    prompt = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, *QUESTION,
              {"role": "tool", "content": "4"}]  # fmt: skip
    given = {"id": "r", "prompt": prompt, "answer": "4"}
    asked = with_reward(given, 2.0, text="\nReward: {reward}", decimals=0)
    assert asked["prompt"] == [*prompt[:2], {"role": "user", "content": "2+2?\nReward: 2"}, prompt[3]]
    assert asked["answer"] == "4"
    assert asked["id"] != "r"
    assert given["prompt"][2] == QUESTION[0]
    with pytest.raises(StageError, match="row r: the prompt has no user message"):
        with_reward({"id": "r", "prompt": prompt[3:]}, 1.0, text="{reward}", decimals=0)
