"""Replay: which groups, how many, how old, and with what log-probs."""

from __future__ import annotations

import json

import pytest
import torch

from rlhf_core.config.rl.difficulty import ReplayConfig
from rlhf_core.errors import StageError
from rlhf_core.rl.filtering import Group
from rlhf_core.rl.replay import Replay
from rlhf_core.rl.stored import StoredGroups
from rlhf_core.types import Prompt, Trajectory

PROMPTS = {name: Prompt(name, name, (7,), {}) for name in "abcdef"}


def replay(share: float = 0.5, max_age: int = 2) -> Replay:
    return Replay(ReplayConfig(share=share, max_age=max_age), 4, PROMPTS.__getitem__, StoredGroups())


def group(name: str, *scores: float | None, version: int = 0) -> Group:
    ids, mask = torch.tensor([7, 1, 2]), torch.tensor([False, True, True])
    logprobs = torch.tensor([0.0, -0.1, -1 / 3])  # a third is no short decimal: stored exactly, or not
    return [
        Trajectory(PROMPTS[name], ids, mask, logprobs, version, "stop", reward=score or 0.0, score=score)
        for score in scores
    ]


def names(groups: list[Group]) -> str:
    return "".join(each[0].prompt.id for each in groups)


def test_the_newest_mixed_groups_are_taken_once() -> None:
    ours = replay()
    assert ours.take(0) == ([], {"replay/prompts": 0.0})
    ours.add([group("a", 1.0, 0.0), group("b", 1.0, 1.0), group("c", 0.0, 0.0), group("d", 0.5, 1.0)], 0)
    ours.add([group("e", 0.0, 1.0)], 1)
    taken, metrics = ours.take(2)  # two of four prompts at most
    assert (names(taken), metrics) == ("ea", {"replay/prompts": 2.0, "replay/age": 1.5})
    assert names(ours.take(2)[0]) == "d"
    assert ours.take(2)[0] == []


def test_groups_that_are_too_old_are_dropped() -> None:
    ours = replay(max_age=2)
    ours.add([group("a", 1.0, 0.0)], 0)
    assert names(ours.take(2)[0]) == "a"
    ours.add([group("b", 1.0, 0.0)], 0)
    assert ours.take(3)[0] == []


def test_no_more_are_kept_than_later_steps_can_take() -> None:
    ours = replay(share=0.25, max_age=2)
    ours.add([group(name, 1.0, 0.0) for name in "abcd"], 0)
    assert names(ours.take(1)[0] + ours.take(1)[0] + ours.take(1)[0]) == "ab"


def test_a_resumed_run_replays_the_same_bits() -> None:
    ours, resumed = replay(), replay()
    ours.add([group("a", 1.0, 0.0, version=3), group("b", 0.0, 1.0, version=3)], 3)
    resumed.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    taken, again = ours.take(4)[0], resumed.take(4)[0]
    assert names(again) == names(taken) == "ab"
    for one, other in zip(taken[0], again[0], strict=True):
        assert torch.equal(one.rollout_logprobs, other.rollout_logprobs)
        assert (one.weight_version, one.reward, one.score) == (other.weight_version, other.reward, other.score)


def test_a_completion_without_a_score_is_an_error() -> None:
    with pytest.raises(StageError, match="replay: the reward gave a completion no score"):
        replay().add([group("a", 1.0, None)], 0)
