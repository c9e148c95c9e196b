"""Rewards by a rubric, whose judge is asked over a real connection on the loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.rewards.rewards import GroupRubricReward, RubricReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards import Reward, build_reward, build_text_reward
from rlhf_core.rewards.text import rewarded
from rlhf_core.system.metering import METER
from rlhf_core.types import Prompt, Trajectory
from tests.rlhf_core.chat_endpoint import Endpoint, chat_endpoint, words_met
from tests.rlhf_core.stages.context import LocalContext

RUBRIC = {"criteria": [
    {"name": "right", "description": "has four", "weight": 3, "required": True},
    {"name": "polite", "description": "has please"},
    {"name": "rude", "description": "has fool", "weight": -2},
]}  # fmt: skip
ROW = {"id": "r", "prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2+2?"}]}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with chat_endpoint() as made:
        made.reply = words_met
        yield made


@pytest.fixture
def rubric(endpoint: Endpoint, tmp_path: Path) -> Iterator[Callable[..., Reward]]:
    (tmp_path / "rubric.json").write_text(json.dumps(RUBRIC))
    made: list[Reward] = []

    def build(**settings: Any) -> Reward:
        given = {"type": "rubric", "url": endpoint.url, "model": "wise", "path": "rubric.json", **settings}
        config = RubricReward.model_validate_json(json.dumps(given))
        made.append(build_text_reward(config, LocalContext(tmp_path / "work", tmp_path)))
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_the_reward_is_the_share_of_the_weights_with_a_metric_for_each_criterion(rubric: Callable[..., Reward]) -> None:
    result = rubric()(["four, please", "four", "four, fool", "five, please"], ["2+2?"] * 4, [ROW] * 4)
    assert result.rewards == result.scores == [1.0, 0.75, 0.25, 0.0]  # (3 + 1) / 4, 3 / 4, (3 - 2) / 4, not right
    assert result.extra == {
        "right": [1.0, 1.0, 1.0, 0.0], "polite": [1.0, 0.0, 0.0, 1.0], "rude": [0.0, 0.0, 1.0, 0.0],
        "met": [2 / 3, 1 / 3, 2 / 3, 1 / 3], "required_missed": [0.0, 0.0, 0.0, 1.0],
    }  # fmt: skip


def test_one_call_for_a_completion_asks_for_json_by_a_schema(endpoint: Endpoint, rubric: Callable[..., Reward]) -> None:
    rubric(system="Be strict.")(["four"], ["2+2?"], [ROW])
    (request,) = endpoint.requests
    system, user = (message["content"] for message in request["messages"])
    assert system == "Be strict."
    assert user.startswith("[system]\nBe kind.\n\n[user]\n2+2?\n\nThe last turn was answered")
    assert "[answer_1]\nfour\n" in user
    assert "[criterion_1] has four\n[criterion_2] has please\n[criterion_3] has fool\n" in user
    wanted = request["response_format"]
    schema = wanted["json_schema"]["schema"]
    verdict = schema["properties"]["answer_1"]["properties"]["criterion_3"]
    assert (wanted["type"], wanted["json_schema"]["strict"], schema["required"]) == ("json_schema", True, ["answer_1"])
    assert verdict == {
        "type": "object", "properties": {"reason": {"type": "string"}, "met": {"type": "boolean"}},
        "required": ["reason", "met"], "additionalProperties": False,
    }  # fmt: skip


def test_what_was_judged_costs_no_call_again(endpoint: Endpoint, rubric: Callable[..., Reward]) -> None:
    METER.clear()
    reward = rubric()
    first = reward(["four", "five", "four"], ["2+2?"] * 3, [ROW] * 3)
    assert reward(["five", "four"], ["2+2?"] * 2, [ROW] * 2).rewards == first.rewards[1:]
    use = METER.judges["wise"]
    assert (len(endpoint.requests), use.calls, use.prompt_tokens, use.completion_tokens) == (2, 2, 20, 4)


def test_a_row_may_have_criteria_of_its_own(endpoint: Endpoint, rubric: Callable[..., Reward]) -> None:
    rows = [{**ROW, "id": word, "rubric": [{"criterion": f"has {word}", "points": 5}]} for word in ("a", "b")]
    assert rubric(path=None, column="rubric")(["a", "a"], ["q"] * 2, rows).rewards == [1.0, 0.0]
    both = rubric(column="rubric")(["four a", "four"], ["q"] * 2, rows)
    assert both.rewards == [pytest.approx(8 / 9), pytest.approx(3 / 9)]  # of 3 + 1 + 5
    assert {"right", "polite", "rude"} <= both.extra.keys()


FOUR = {"reason": "so", "met": True}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("Yes, it is.", r"\(row r\): the reply is not the JSON that was asked for \(not JSON"),
        ("[]", "the reply lacks `answer_1`"),
        (
            '{"answer_1": {"criterion_1": {"met": true}}}',
            "`answer_1` lacks `criterion_2`; expected criterion_1 to crit",
        ),
        (
            json.dumps({"answer_1": dict.fromkeys(("criterion_1", "criterion_2", "criterion_3", "criterion_4"), FOUR)}),
            "`answer_1` has `criterion_4`",
        ),
        (
            json.dumps({"answer_1": {f"criterion_{number}": {"met": "yes"} for number in (1, 2, 3)}}),
            "`answer_1.criterion_1.met` is 'yes', expected true or false",
        ),
        (None, "answered without text"),  # a refusal
    ],
)
def test_a_malformed_reply_is_an_error_that_names_the_row_and_may_be_tolerated(
    endpoint: Endpoint, rubric: Callable[..., Reward], reply: Any, message: str
) -> None:
    endpoint.reply = lambda text: words_met(text) if "fine" in text else reply
    asked = (["fine four", "four"], ["q", "q"], [{**ROW, "id": "s"}, ROW])
    with pytest.raises(RewardError, match=message):
        rubric()(*asked)
    result = rubric(tolerated_failures=0.5)(*asked)
    assert (result.rewards[0], list(result.failures)) == (0.75, [1])


def test_criteria_without_a_weight_and_files_without_criteria_are_errors(
    endpoint: Endpoint, rubric: Callable[..., Reward], tmp_path: Path
) -> None:
    row = {**ROW, "rubric": [{"criterion": "has a", "points": -5}]}
    with pytest.raises(RewardError, match="row r: no criterion has a weight above 0"):
        rubric(path=None, column="rubric")(["a"], ["q"], [row])
    (tmp_path / "rubric.json").write_text("{}")
    with pytest.raises(RewardError, match=r"rubric\.json: expected a mapping with the key `criteria` alone"):
        rubric()
    with pytest.raises(ValueError, match="there are no criteria: set `path` to a file with them, or `column`"):
        RubricReward.model_validate_json(json.dumps({"type": "rubric", "url": "http://a.b", "model": "m"}))
    assert endpoint.requests == []


def test_a_group_is_judged_in_one_call(endpoint: Endpoint, rubric: Callable[..., Reward], tmp_path: Path) -> None:
    rubric()  # writes the file
    given = {"type": "group_rubric", "url": endpoint.url, "model": "wise", "path": "rubric.json"}
    config = GroupRubricReward.model_validate_json(json.dumps(given))
    reward = build_reward(config, LocalContext(tmp_path / "work", tmp_path))
    ids, mask = torch.tensor([7, 7]), torch.tensor([False, True])
    groups = [
        [Trajectory(Prompt("r", "2+2?", (7,), ROW), ids, mask, torch.zeros(2), 0, "stop", text) for text in texts]
        for texts in (("four", "five", "four, please"), ("fool four",))
    ]
    result = rewarded(reward, groups)
    assert (result.rewards, result.scores) == ([0.75, 0.0, 1.0, 0.25], [None] * 4)
    assert result.extra["polite"] == [0.0, 0.0, 1.0, 0.0]
    assert sorted(len(re["response_format"]["json_schema"]["schema"]["properties"]) for re in endpoint.requests) == [
        1,
        3,
    ]
    reward.close()
