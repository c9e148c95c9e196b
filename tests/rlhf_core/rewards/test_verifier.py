from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlhf_core.config.rewards.rewards import VerifierReward
from rlhf_core.data.formats import canonical_row
from rlhf_core.data.sources.reasoning import generate
from rlhf_core.errors import RewardError
from rlhf_core.rewards.verifier import Verifier

ROW = {"id": "r", "answer": "big  cat"}


def judge(completion: str, pattern: str | None = None) -> float:
    result = Verifier(VerifierReward(type="verifier", pattern=pattern))([completion], ["?"], [ROW])
    assert result.scores == result.rewards
    return result.rewards[0]


@pytest.mark.parametrize(
    ("completion", "pattern", "expected"),
    [
        ("big cat", None, 1.0),
        ("\n big\tcat ", None, 1.0),
        ("big cat.", None, 0.0),
        ("Big cat", None, 0.0),
        ("", None, 0.0),
        ("so: <a>big cat</a>", "<a>(.*?)</a>", 1.0),
        ("<a>dog</a> no, <a>big cat</a>", "<a>(.*?)</a>", 1.0),
        ("<a>big cat</a> no, <a>dog</a>", "<a>(.*?)</a>", 0.0),
        ("big cat", "<a>(.*?)</a>", 0.0),
        ("x", "(y)?x", 0.0),  # a group that took no part is no answer
    ],
)
def test_exact(completion: str, pattern: str | None, expected: float) -> None:
    assert judge(completion, pattern) == expected


@pytest.mark.parts
def test_reasoning_gym_uses_the_tasks_scorer() -> None:
    (raw,) = generate("spell_backward", {"min_word_len": 4, "max_word_len": 4}, size=1, seed=1, data_format="prompts")
    row = canonical_row(raw, "prompts", {})
    verifier = Verifier(VerifierReward(type="verifier", kind="reasoning_gym", pattern="is (.*)"))
    half = row["answer"][:2] + "##"
    rewards = verifier([f"it is {row['answer']}", f"it is {half}", "no"], ["", "", ""], [row, row, row]).rewards
    assert rewards[0] == 1.0
    assert 0 < rewards[1] < 1
    assert rewards[2] == 0.0


def test_a_pattern_that_backtracks_for_ever_is_stopped_and_named() -> None:
    config = VerifierReward(type="verifier", pattern="(a|aa)+$", timeout_seconds=0.2)
    with pytest.raises(RewardError, match=r"completion 1 .* the pattern .\(a\|aa\)\+\$. did not end within 0\.2 s"):
        Verifier(config)(["b", 60 * "a" + "b"], ["", ""], [ROW, ROW])
    tolerant = config.model_copy(update={"tolerated_failures": 0.5})
    result = Verifier(tolerant)(["big cat", 60 * "a" + "b"], ["", ""], [ROW, ROW])
    assert (result.rewards[0], list(result.failures)) == (0.0, [1])


@pytest.mark.parts
def test_a_scorer_that_evaluates_what_never_ends_is_stopped() -> None:
    (raw,) = generate("countdown", {}, size=1, seed=1, data_format="prompts")
    row = canonical_row(raw, "prompts", {})
    verifier = Verifier(VerifierReward(type="verifier", kind="reasoning_gym", timeout_seconds=1.0))
    with pytest.raises(
        RewardError, match=r"completion 0 \('9\*\*.*score_one did not return within 1 s and was stopped"
    ):
        verifier(["9**9**9**9**9"], [""], [row])
    assert verifier([row["answer"]], [""], [row]).rewards == [1.0]
    verifier.close()


def test_a_row_without_answer_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match="completion 1: the dataset row r2 has no column 'answer'"):
        Verifier(VerifierReward(type="verifier", pattern=None))(["a", "b"], ["", ""], [ROW, {"id": "r2"}])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "not a regular expression"),
        ("abc", "has no group"),
        ("(" * 999 + ")" * 999, "hundreds of groups inside each other"),
        ("((((a{999}){999}){999}){999})", "repetitions, {n}, multiply to more than 1000000"),
        ("(a{99999999999})", "repetitions, {n}, multiply to more than 1000000"),
    ],
)
def test_wrong_patterns(pattern: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VerifierReward(type="verifier", pattern=pattern)
