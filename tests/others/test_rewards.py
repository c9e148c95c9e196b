"""Reward functions that were written for TRL, OpenRLHF and verl run as they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rewards.rewards import FunctionReward
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.rewards import build_text_reward
from rlhf_core.rewards.base import RewardResult
from tests.rlhf_core.stages.context import LocalContext

pytestmark = pytest.mark.parts

FILES = Path(__file__).parent / "rewards"
VERL = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}, "extra_info": {"split": "train"}}

Judge = Callable[..., RewardResult]


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    made = []

    def call(file: str, form: str, function: str, samples: Sequence[tuple[str, str, dict[str, Any]]], **settings: Any):
        config = FunctionReward(type="function", path=file, form=form, function=function, **settings)  # type: ignore[arg-type]
        made.append(build_text_reward(config, LocalContext(tmp_path / "work", user_files_root=FILES)))
        completions, prompts, rows = ([sample[i] for sample in samples] for i in range(3))
        return made[-1](completions, prompts, rows)

    yield call
    for reward in made:
        reward.close()


def test_trl_gets_texts_and_columns(judge: Judge) -> None:
    samples = [
        ("<think>2</think> <answer>4</answer>", "2+2", {"prompt": [{}], "ground_truth": "4"}),
        ("<answer>5</answer>", "2+2", {"prompt": [{}], "ground_truth": "4"}),
    ]
    assert judge("trl_text.py", "trl", "format_reward", samples).rewards == [1.0, 0.0]
    result = judge("trl_text.py", "trl", "accuracy_reward", samples)
    assert result.rewards == [1.0, 0.0]
    assert result.scores == [None, None]
    assert result.extra == {"length": [35.0, 18.0], "with_answer": [1.0, 1.0]}
    assert judge("trl_text.py", "trl", "shortness", samples).rewards == [-35.0, -18.0]


def test_none_of_trl_is_a_reward_that_does_not_apply(judge: Judge) -> None:
    samples = [("<answer>4</answer>", "2+2", {"ground_truth": "4"}), ("a poem", "write", {"theme": "sea"})]
    result = judge("trl_text.py", "trl", "accuracy_reward", samples)
    assert (result.rewards, result.inapplicable, result.failures) == ([1.0, 0.0], {1}, {})
    with pytest.raises(RewardError, match="completion 1: the reward is None, which means that it does not apply"):
        result.totals()  # in an evaluation


def test_a_function_of_trl_without_further_arguments_gets_those_that_it_names(judge: Judge) -> None:
    rows = [{"ground_truth": "a", "other": 1}, {"ground_truth": "b", "other": 2}]
    samples = [("a", "p", rows[0]), ("a", "p", rows[1])]
    assert judge("trl_text.py", "trl", "exactly_its_columns", samples).rewards == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"needs the column `ground_truth`; the rows have \['answer'\]"):
        judge("trl_text.py", "trl", "exactly_its_columns", [("a", "p", {"answer": "a"})])


def test_columns_never_replace_what_is_passed(judge: Judge) -> None:
    with pytest.raises(RewardError, match="gets `completions` beside the rows: rename their column of this name"):
        judge("trl_text.py", "trl", "format_reward", [("a", "p", {"completions": "b"})])


def test_trl_of_messages(judge: Judge) -> None:
    def asked(text: str) -> dict[str, Any]:
        return {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": text}], "solution": "4"}

    samples = [
        ("Please: 4", "2+2, please", asked("2+2, please")), ("5", "2+2", asked("2+2")), ("Please", "2+2", asked("2+2")),
    ]  # fmt: skip
    result = judge("trl_conversational.py", "trl_conversational", "polite_and_right", samples)
    assert result.rewards == [1.5, 0.5, 0.0]


def test_openrlhf_gets_lists_of_one(judge: Judge) -> None:
    samples = [(" it is 4", "2+2?", {"answer": "4"}), (" it is 15", "2+2, not 4?", {"answer": "4"})]
    result = judge("openrlhf_func.py", "openrlhf", "reward_func", samples)
    assert result.rewards == [1.0, -1.0]
    assert result.scores == [None, None]  # they repeat rewards that are no scores
    assert result.extra == {"response_length": [8.0, 9.0]}
    assert judge("openrlhf_func.py", "openrlhf", "only_a_tensor", samples).rewards == [12.0, 20.0]
    result = judge("openrlhf_lists.py", "openrlhf", "with_scores", samples)
    assert (result.rewards, result.scores) == ([1.0, 1.0], [1.0, 1.0])
    with pytest.raises(RewardError, match="completion 0: the reward is nan, expected a finite number"):
        judge("openrlhf_lists.py", "openrlhf", "fails", samples)


def test_verl_gets_one_completion(judge: Judge) -> None:
    samples = [("#### 72", "p", VERL), ("#### 7", "p", VERL), ("no", "p", VERL | {"extra_info": {"split": "test"}})]
    result = judge("verl_score.py", "verl", "compute_score", samples)
    assert (result.rewards, result.scores) == ([1.0, 0.1, 0.0], [1.0, 0.0, 0.0])
    assert result.extra == {"split_is_train": [1.0, 1.0, 0.0]}
    result = judge("verl_score.py", "verl", "only_a_number", samples, options={"penalty": 0.5})
    assert (result.rewards, result.scores) == ([0.5, -0.5, -0.5], [None] * 3)
    with pytest.raises(RewardError, match="completion 0: the reward is None"):
        judge("verl_score.py", "verl", "nothing", samples)
    with pytest.raises(RewardError, match=r"without_a_score: there is no `score` in \['reward'\]"):
        judge("verl_score.py", "verl", "without_a_score", samples)


def test_the_ground_truth_of_verl_may_be_the_answer(judge: Judge) -> None:
    row = {"data_source": "mine", "answer": "72"}
    assert judge("verl_score.py", "verl", "only_a_number", [("72", "p", row)]).rewards == [1.0]
    with pytest.raises(
        RewardError, match=r"needs a ground truth: give the rows `reward_model\.ground_truth`, or `answer`"
    ):
        judge("verl_score.py", "verl", "only_a_number", [("72", "p", {"data_source": "mine"})])
    with pytest.raises(RewardError, match=r"needs the column `data_source`; the rows have \['answer'\]"):
        judge("verl_score.py", "verl", "only_a_number", [("72", "p", {"answer": "72"})])


def test_coroutines_of_verl_run_concurrently(judge: Judge) -> None:
    judge("verl_score.py", "verl", "awaited", [("72", "p", VERL)])
    begun = time.monotonic()
    assert judge("verl_score.py", "verl", "awaited", [("72", "p", VERL)] * 64).rewards == [1.0] * 64
    assert time.monotonic() - begun < 64 * 0.2


@pytest.mark.parametrize(
    ("file", "form", "function", "settings", "sentence"),
    [
        ("trl_text.py", "trl", "of_the_trainer", {}, "needs TRL's `completion_ids`, which there is not here: give it"),
        ("trl_text.py", "trl", "exactly_its_columns", {"options": {"limit": 1}}, "as TRL calls it: it takes no arg"),
        ("trl_text.py", "trl", "format_reward", {"options": {"completions": 1}}, "multiple values for"),
        ("openrlhf_lists.py", "openrlhf", "two_arguments", {}, r"must take \(queries, prompts, labels\), as OpenRLHF"),
        ("verl_score.py", "verl", "other_names", {}, r"must take \(data_source, solution_str, ground_truth, extra_"),
        ("verl_score.py", "verl", "compute_score", {"options": {"rows": 1}}, "and its options .*'rows'.*as verl calls"),
    ],
)
def test_a_function_of_another_form_is_refused_as_it_loads(
    judge: Judge, file: str, form: str, function: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RecipeError, match=sentence):
        judge(file, form, function, [("a", "p", {})], **settings)


def test_a_column_that_only_trl_has_is_an_error(judge: Judge) -> None:
    with pytest.raises(RewardError, match="of_its_state raised KeyError: 'trainer_state'"):
        judge("trl_text.py", "trl", "of_its_state", [("a", "p", {})])
