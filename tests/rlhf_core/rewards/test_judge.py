"""A judge behind an OpenAI-compatible endpoint, over a real connection on the loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rewards.judges import PairJudgeConfig
from rlhf_core.config.rewards.rewards import JudgeReward
from rlhf_core.config.stages.sampled import PairsConfig
from rlhf_core.contract import Input
from rlhf_core.data.reading import read_rows
from rlhf_core.errors import RewardError, StageError
from rlhf_core.rewards import Reward, build_text_reward
from rlhf_core.stages import sampled
from tests.rlhf_core.chat_endpoint import Endpoint, chat_endpoint
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.stages.supervised_runs import dataset


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with chat_endpoint() as made:
        yield made


@pytest.fixture
def judge(endpoint: Endpoint, tmp_path: Path) -> Iterator[Callable[..., Reward]]:
    made: list[Reward] = []

    def build(**settings: Any) -> Reward:
        given = {
            "type": "judge", "url": endpoint.url, "model": "wise", "pattern": r"Score: (\S+)",
            "template": "Q: {{ prompt }} A: {{ completion }}", **settings,
        }  # fmt: skip
        made.append(build_text_reward(JudgeReward.model_validate_json(json.dumps(given)), LocalContext(tmp_path)))
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_its_verdicts_are_rewards_and_scores(
    endpoint: Endpoint, judge: Callable[..., Reward], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_HEADER_JUDGE", "Authorization: Bearer secret")
    endpoint.reply = lambda text: f"Score: 1. No. Score: {len(text) - 8}"
    reward = judge(range=[0, 10], system="Be strict.", header_variable="ALIGNMENT_HEADER_JUDGE", max_tokens=7)
    result = reward(["a", "bcd"], ["p", "p"], [{}, {}])
    assert (result.rewards, result.scores) == ([1.0, 3.0], [0.1, 0.3])
    assert sorted(endpoint.requests, key=lambda request: str(request["messages"]))[0] == {
        "path": "/v1/chat/completions", "key": "Bearer secret", "model": "wise", "temperature": 0.0, "max_tokens": 7,
        "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "Q: p A: a"}],
    }  # fmt: skip


def test_a_text_is_asked_about_once(endpoint: Endpoint, judge: Callable[..., Reward]) -> None:
    endpoint.reply = lambda text: f"Score: {len(text)}"
    reward = judge()
    for _ in range(2):
        assert reward(["a", "bb", "a"], ["p"] * 3, [{}] * 3).rewards == [9.0, 10.0, 9.0]
    assert sorted(request["messages"][0]["content"] for request in endpoint.requests) == ["Q: p A: a", "Q: p A: bb"]


def test_verdicts_may_be_words(endpoint: Endpoint, judge: Callable[..., Reward]) -> None:
    endpoint.reply = lambda text: "Score: good" if text.endswith("a") else "Score: bad"
    result = judge(verdicts={"good": 1.0, "bad": -1.0})(["a", "b"], ["p", "p"], [{}, {}])
    assert (result.rewards, result.scores) == ([1.0, -1.0], [None, None])


@pytest.mark.parametrize(
    ("settings", "reply", "message"),
    [
        ({}, "I cannot say", "finds no verdict in 'I cannot say'"),
        ({}, "Score: high", "the verdict 'high' is not a number: give `verdicts`"),
        ({}, "Score: nan", "the verdict 'nan' is not a finite number"),
        ({"range": [0, 10]}, "Score: 11", "the verdict '11' is not from 0 to 10"),
        ({"verdicts": {"good": 1.0}}, "Score: bad", "the verdict 'bad' is none of good"),
        ({}, None, "answered without text"),
        ({}, b"<html>", "did not answer with JSON: '<html>'"),
        ({}, b'{"error": "no such model"}', "expected a chat completion"),
        ({"template": "{{ completion }}{{ row.answer }}"}, "Score: 1", "the template cannot be written for row r: "),
    ],
)
def test_no_verdict_is_an_error_and_may_be_tolerated(
    endpoint: Endpoint, judge: Callable[..., Reward], settings: dict[str, Any], reply: Any, message: str
) -> None:
    good = {"answer": "fine"}
    endpoint.reply = lambda text: "Score: good" if "verdicts" in settings and "fine" in text else (
        "Score: 1" if "fine" in text else reply
    )  # fmt: skip
    asked = (["fine", "b"], ["p", "p"], [good, {"id": "r"}])
    with pytest.raises(RewardError) as raised:
        judge(**settings)(*asked)
    assert message in str(raised.value)
    result = judge(tolerated_failures=0.5, **settings)(*asked)
    assert (result.rewards[0], list(result.failures)) == (1.0, [1])
    assert message in result.failures[1]


COMPLETIONS = [
    {"prompt": [{"role": "user", "content": "q"}], "completions": [{"text": text} for text in texts]}
    for texts in (["long one", "long one!", "x"], ["ab", "cd"])
]
ASKED = {"model": "wise", "template": "{{ prompt }}|{{ first }}|{{ second }}", "pattern": "(.+)", "tie": "C"}


def longer(text: str) -> str:
    """Prefers the longer one; of equally long ones the first, of nearly equally long ones neither."""
    _, first, second = text.split("|")
    if abs(len(first) - len(second)) == 1:
        return "C"
    return "A" if len(first) >= len(second) else "B"


@pytest.fixture
def completions(tmp_path: Path) -> dict[str, Input]:
    return {"dataset": dataset(tmp_path / "completions", COMPLETIONS)}


def test_a_judge_of_pairs_is_asked_in_both_orders(
    endpoint: Endpoint, completions: dict[str, Input], tmp_path: Path
) -> None:
    endpoint.reply = longer
    config = PairsConfig(dataset="d", select="all", judge=PairJudgeConfig(url=endpoint.url, **ASKED))
    output = sampled.pairs(config, completions, LocalContext(tmp_path / "pairs"))
    pairs = [(row["chosen"], row["rejected"]) for row in read_rows(output.folder)]
    assert pairs == [("long one", "x"), ("long one!", "x")]
    assert output.metrics == {
        "rows": 2, "ties": 1, "order_dependent": 1, "unjudged": 0, "prompts_without_pair": 1, "equal_completions": 0,
        "empty_completions": 0, "truncated_completions": 0,
    }  # fmt: skip
    assert len(endpoint.requests) == 8


def test_a_judge_of_pairs_that_fails(endpoint: Endpoint, completions: dict[str, Input], tmp_path: Path) -> None:
    endpoint.reply = lambda text: "D" if "x" in text else longer(text)

    def run(share: float) -> Any:
        judge = PairJudgeConfig(url=endpoint.url, tolerated_failures=share, **ASKED)
        config = PairsConfig(dataset="d", select="all", judge=judge)
        return sampled.pairs(config, completions, LocalContext(tmp_path / f"pairs-{share}"))

    with pytest.raises(RewardError, match="the verdict 'D' is none of A, B, C"):
        run(0.0)
    with pytest.raises(
        StageError, match=r"the judge failed for 2 of 4 pairs, more than its `tolerated_failures` of 0\.4"
    ):
        run(0.4)
    with pytest.raises(StageError, match=r"the judge prefers no completion of any prompt: 1 ties.*2 unjudged"):
        run(0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"margin": 0.5, "judge": {}}, "with `judge` the rewards do not decide: remove `margin`"),
        ({"judge": {"tie": "A"}}, "`first`, `second` and `tie` must be three different verdicts"),
        ({"judge": {"template": "{{ completion }}"}}, "the template names `completion`; there are prompt, first"),
        ({"judge": {"pattern": "A|B"}}, "the regular expression has no group"),
    ],
)
def test_judges_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    judge = {"url": "http://a.b/v1", **ASKED, **settings["judge"]}
    with pytest.raises(ValueError, match="value_error") as caught:
        PairsConfig.model_validate_json(json.dumps({"dataset": "d", **settings, "judge": judge}))
    assert message in str(caught.value)
