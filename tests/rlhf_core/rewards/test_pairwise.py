"""Win rates by a judge of pairs, over a real connection on the loopback."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.config.rewards.rewards import PairwiseReward
from rlhf_core.config.rl.algorithms import GRPOConfig, PPOConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards import RewardResult, TrajectoryReward, open_rewards
from rlhf_core.rewards.pairwise import opponents
from rlhf_core.rewards.text import rewarded
from rlhf_core.rl.rewarding import RewardPipeline
from rlhf_core.types import Prompt, Trajectory
from tests.rlhf_core.chat_endpoint import Endpoint, chat_endpoint
from tests.rlhf_core.stages.context import LocalContext

SETTINGS = {"type": "pairwise", "model": "wise", "template": "{{ prompt }}|{{ first }}|{{ second }}", "pattern": "(.+)"}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with chat_endpoint() as made:
        made.reply = longer
        yield made


def longer(text: str) -> str:
    """Prefers the longer completion, of equally long ones none."""
    _, first, second = text.split("|")
    return "C" if len(first) == len(second) else "A" if len(first) > len(second) else "B"


@pytest.fixture
def reward(endpoint: Endpoint, tmp_path: Path) -> Iterator[Callable[..., TrajectoryReward]]:
    opened = []

    def build(**settings: Any) -> TrajectoryReward:
        given = json.dumps({**SETTINGS, "url": endpoint.url, "tie": "C", **settings})
        config = PairwiseReward.model_validate_json(given)
        opened.append(open_rewards({"wins": config}, LocalContext(tmp_path)))
        return opened[-1].__enter__()["wins"]

    yield build
    for each in opened:
        each.__exit__(None, None, None)


def group(*completions: str, name: str = "r", **columns: Any) -> list[Trajectory]:
    row = {"id": name, "prompt": [{"role": "user", "content": "q"}], **columns}
    ids, mask = torch.tensor([7, 7]), torch.tensor([False, True])
    prompt = Prompt(name, "q", (7,), row)
    return [Trajectory(prompt, ids, mask, torch.zeros(2), 0, "stop", text) for text in completions]


def test_the_reward_is_the_share_of_won_comparisons(
    endpoint: Endpoint, reward: Callable[..., TrajectoryReward]
) -> None:
    result = reward()(group("aaaa", "bb", "cc", "d"))
    assert result.rewards == [1.0, 0.5, 0.5, 0.0]  # bb and cc: a win, a defeat, a tie
    assert result.scores == [None] * 4
    assert result.extra == {"order_dependent": [0.0] * 4}
    assert len(endpoint.requests) == 12  # six pairs in both orders


def test_a_judge_that_always_prefers_the_first_is_worth_nothing(
    endpoint: Endpoint, reward: Callable[..., TrajectoryReward]
) -> None:
    endpoint.reply = lambda text: "A"
    result = reward()(group("aaaa", "bb", "c"))
    assert (result.rewards, result.extra) == ([0.5] * 3, {"order_dependent": [1.0] * 3})


def test_equal_completions_tie_without_a_call_and_a_pair_is_asked_about_once(
    endpoint: Endpoint, reward: Callable[..., TrajectoryReward]
) -> None:
    wins = reward()
    for _ in range(2):
        assert wins(group("a", "a", "bb")).rewards == [0.25, 0.25, 1.0]
    assert len(endpoint.requests) == 2


def test_completions_are_compared_with_the_row_s_own(
    endpoint: Endpoint, reward: Callable[..., TrajectoryReward]
) -> None:
    wins = reward(reference="gold")
    assert wins(group("aaaa", "bb", "c", gold="xx")).rewards == [1.0, 0.5, 0.0]
    assert len(endpoint.requests) == 6
    with pytest.raises(RewardError, match="row r: the column `gold` has no completion to compare with: None"):
        wins(group("a", "b"))


def test_opponents_bound_the_calls_and_are_drawn_alike_again(
    endpoint: Endpoint, reward: Callable[..., TrajectoryReward]
) -> None:
    eight = group(*("x" * length for length in range(1, 9)))
    wins = reward(opponents=2)
    first = wins(eight)
    assert len(endpoint.requests) == 2 * 8
    assert reward(opponents=2)(eight).rewards == first.rewards
    assert sum(first.rewards) == 4.0
    assert (first.rewards[0], first.rewards[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("count", "least", "pairs"), [(8, 1, 4), (8, 3, 12), (7, 2, 9), (2, 1, 1), (3, 9, 3), (1, 1, 0)]
)
def test_opponents_are_enough_and_none_is_met_twice(count: int, least: int, pairs: int) -> None:
    drawn = list(opponents(count, least, Random(1)))
    met = Counter(one for pair in drawn for one in pair)
    assert len(drawn) == len({frozenset(pair) for pair in drawn}) == pairs
    wanted = min(least, count - 1)
    assert all(wanted <= met[one] <= wanted + count % 2 for one in range(count))


def test_a_failure_is_an_error_that_names_the_row_or_drops_the_group(
    endpoint: Endpoint, reward: Callable[..., TrajectoryReward]
) -> None:
    endpoint.reply = lambda text: "" if "bad" in text else longer(text)
    with pytest.raises(RewardError, match=r"\(row r\): the pattern '\(\.\+\)' finds no verdict in ''"):
        reward()(group("bad", "aa"))
    tolerant = reward(tolerated_failures=0.5)
    result = rewarded(tolerant, [group("aa", "b"), group("bad", "aa", name="s")])
    assert (result.rewards[:2], list(result.failures)) == ([1.0, 0.0], [2, 3])
    with pytest.raises(RewardError, match=r"failed for 2 of 2 completions, more than its `tolerated_failures` of 0\.5"):
        tolerant(group("bad", "aa"))


class Lengths:
    def __call__(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        return RewardResult([float(len(t.completion)) for t in trajectories], [None] * len(trajectories))

    def close(self) -> None: ...


def test_a_step_compares_within_its_groups(endpoint: Endpoint, reward: Callable[..., TrajectoryReward]) -> None:
    endpoint.reply = lambda text: "?" if "bad" in text else longer(text)
    wins = {**SETTINGS, "url": endpoint.url, "tolerated_failures": 0.5, "weight": 2.0}
    config = GRPOConfig.model_validate_json(json.dumps({
        "rewards": {"wins": wins, "long": {"type": "function", "path": "r.py"}}, "optimizer": {"learning_rate": 1.0},
    }))  # fmt: skip
    made: dict[str, TrajectoryReward] = {"wins": reward(tolerated_failures=0.5), "long": Lengths()}
    pipeline = RewardPipeline(config, 8, made, word_level_tokenizer([], 64))
    twice = group("aaa", "b")  # a prompt drawn twice in a step is two groups
    dropped, *kept = pipeline([group("bad", "x", name="s"), twice, group("a", "bb", name="r")])
    assert dropped is None
    assert [[t.reward for t in each or ()] for each in kept] == [[5.0, 1.0], [1.0, 4.0]]
    assert [t.extra["wins"] for t in kept[0] or ()] == [1.0, 0.0]
    assert pipeline.take_failures() == {"reward/wins/failures": 2.0}


def test_groups_of_several_prompts_are_no_group(reward: Callable[..., TrajectoryReward]) -> None:
    with pytest.raises(RewardError, match="got the completions of several prompts as one group"):
        reward()([*group("a"), *group("b", name="other")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": "gold", "opponents": 2}, "with `reference` each completion is compared with that alone"),
        ({}, "rewards.wins compares the completions of a prompt, but group_size is 1: set 2 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    optimizer = {"optimizer": {"learning_rate": 1.0}}
    wins = {**SETTINGS, "url": "http://a.b/v1", **settings}
    with pytest.raises(ValueError, match="rewards") as caught:
        PPOConfig.model_validate_json(json.dumps({"rewards": {"wins": wins}, "critic": optimizer, **optimizer}))
    assert message in str(caught.value)
