"""Validation of environments in a recipe."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.base import result_settings
from rlhf_core.config.environments.environments import EnvironmentConfig
from rlhf_core.config.rewards.rewards import EnvironmentReward
from rlhf_core.config.rl.stage import RLConfig
from tests.rlhf_core.config.test_rl import COMMON, GRPO


def config(**settings: Any) -> RLConfig:
    grpo = {**GRPO, **settings.pop("grpo", {})}
    retry = {"type": "retry", "feedback": "no", "max_turns": 3}
    return RLConfig.model_validate({**COMMON, "environment": retry, "grpo": grpo, **settings})


def by_row(**choices: dict[str, Any]) -> dict[str, Any]:
    return {"type": "by_row", "choices": choices}


def tools(**given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tools", "parser": "hermes", "tools": given}


TOLERANT = {"type": "function", "path": "game.py", "tolerated_failures": 0.1}


def test_a_single_turn_stays_out_of_the_key() -> None:
    def settings(environment: dict[str, Any] | None) -> dict[str, Any]:
        plain = config().model_dump(exclude_unset=True)
        del plain["environment"]
        return result_settings(
            RLConfig.model_validate({**plain, **({"environment": environment} if environment else {})})
        )

    assert "environment" not in settings(None)
    assert settings(None) == settings({"type": "single_turn"})
    assert settings({"type": "retry"})["environment"]["max_turns"] == 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"environment": {"type": "function"}}, "Field required"),
        ({"environment": {"type": "function", "path": "game.py", "files": ["../a.py"]}}, "in the folder of game.py"),
        ({"environment": {"type": "function", "path": "game.py", "tolerated_failures": 1}}, "less than 1"),
        ({"environment": {"type": "function", "path": "game.py", "class": "Game"}}, "class"),
        (
            {"environment": {"type": "single_turn"}, "grpo": {"rewards": {"e": {"type": "environment"}}}},
            "grpo.rewards.e is the reward of an environment, but `environment` is single_turn",
        ),
        ({"environment": {"type": "retry", "pattern": "("}}, "not a regular expression"),
        ({"environment": {"type": "retry", "pattern": "a"}}, "the regular expression has no group"),
        ({"environment": {"type": "retry", "feedback": " \u200b\n"}}, "nothing of this text can be seen: write one"),
        ({"environment": {**tools(python={"type": "python"}), "call_marker": " "}}, "nothing of this text can be"),
        ({"environment": {"type": "retry", "max_turns": 0}}, "from 1 to 1000"),
        ({"environment": {"type": "single_turn", "max_turns": 2}}, "Input should be 1"),
        ({"environment": {"type": "rety"}}, "there is no environment `rety` (did you mean `retry`?)"),
        ({"environment": by_row(retry={"type": "by_row"})}, "there is no environment `by_row`; there are single_turn"),
        ({"environment": {"type": "by_row", "choices": {}}}, "at least 1 item"),
        ({"environment": by_row(g=TOLERANT)}, "choices.g.tolerated_failures: the episodes of all rows are played"),
        ({"environment": {"type": "tools", "parser": "hermes", "tools": {}}}, "at least 1 item"),
        ({"environment": tools(python={"type": "pyton"})}, "there is no tool `pyton` (did you mean `python`?)"),
        ({"environment": tools(python={"type": "python", "timeout_seconds": 0})}, "more than 0"),
        ({"environment": {"type": "nemo_gym"}}, "give one of `url`, `urls` and `url_variable`"),
        ({"environment": {"type": "nemo_gym", "url": "gym:80"}}, "the URL must begin with http:// or https://"),
        ({"environment": {"type": "nemo_gym", "url": "http://me:pw@gym"}}, "the URL holds a user or password"),
        ({"environment": "retry"}, "write a mapping with a key `type`, which chooses the environment"),
        (
            {"environment": {"type": "agent", "path": "agent.py"}},
            "environment `agent` requests replies at any time, so its episodes cannot be played in rounds",
        ),
        ({"environment": {"type": "executor", "path": "agent.py"}}, "set rollout.repeatable to false"),
        (
            {"environment": {"type": "agent", "path": "agent.py", "network": {}, "options": {"certificate": "x"}}},
            "certificate",
        ),
        (
            {
                "environment": {"type": "agent", "path": "agent.py", "max_turns": 1},
                "keep": {"rollouts_every": 1},
                "rollout": {**COMMON["rollout"], "repeatable": False},
            },
            "keep.rollouts_every: rollouts are kept as completions of prompts",
        ),
        (
            {"environment": {"type": "single_turn"}, "grpo": {}, "monitors": {"e": {"type": "environment"}}},
            "monitors.e is the reward of an environment, but `environment` is single_turn",
        ),
        (
            {
                "environment": {"type": "single_turn"},
                "validation": {
                    "dataset": "d",
                    "every_steps": 1,
                    "scorers": {"e": {"type": "verifier"}},
                    "also": {"games": {"dataset": "d", "scorers": {"e": {"type": "environment", "threshold": 1.0}}}},
                },
            },
            "validation.also.games.scorers.e is the reward of an environment",
        ),
        (
            {"grpo": {"rewards": {"e": {"type": "environment", "threshold": 1.0, "scored": True}}}},
            "threshold makes a score of the reward, and scored reads one beside it",
        ),
        ({"monitors": {"e": {"type": "environment", "weight": 2.0}}}, "a scorer is never summed with another"),
        (
            {"grpo": {"rewards": {"e": {"type": "environment"}}, "filtering": {}}},
            "an environment with a `threshold` or `scored`, and no other does: of `rewards` there is e (environment);",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_the_recipe_is_read(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**changes)
    assert problem in str(caught.value)


def test_a_threshold_makes_a_score_of_what_an_environment_gives() -> None:
    rewards = {"e": {"type": "environment", "threshold": 0.5}}
    settings = config(grpo={"rewards": rewards, "filtering": {"score": "e"}}).settings
    assert settings.driver_rewards["e"] == EnvironmentReward(type="environment", threshold=0.5)
    without = config(grpo={"rewards": {"e": {"type": "environment"}}})
    assert "threshold" not in result_settings(without)["grpo"]["rewards"]["e"]  # keys of earlier runs


def test_a_resource_server_without_calls_has_one_turn() -> None:
    gym = {"type": "nemo_gym", "url": "http://gym:80", "max_turns": 6}
    plain, calling = config(environment=gym), config(environment=by_row(g={**gym, "parser": "hermes"}))
    assert (plain.max_sampled_tokens, calling.max_sampled_tokens) == (4, 24)
    assert (plain.environment.appends_turns, plain.environment.calls_tools) == (False, False)
    assert (calling.environment.appends_turns, calling.environment.calls_tools) == (True, True)


def test_the_longest_episode_counts_for_what_depends_on_it() -> None:
    assert config().max_sampled_tokens == 12
    assert isinstance(config().environment, EnvironmentConfig)
    choices = by_row(retry={"type": "retry", "max_turns": 5}, plain={"type": "single_turn"})
    assert config(environment=choices).max_sampled_tokens == 20
