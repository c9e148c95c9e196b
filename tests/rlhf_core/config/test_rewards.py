"""Rewards, shaping and filtering in a recipe: invalid ones are rejected when the recipe is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.base import result_settings
from rlhf_core.config.environments.environments import AgentEnvironment, NemoGymEnvironment
from rlhf_core.config.rewards.rewards import (
    FunctionReward,
    HTTPReward,
    JudgeReward,
    RewardConfig,
    VerifierReward,
)
from rlhf_core.config.rewards.scorers import MonitorConfig, ScorerConfig
from rlhf_core.config.rewards.verifiers import VERIFIERS
from rlhf_core.config.rl.algorithms import AlgorithmConfig
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.servers import ServerConfig
from rlhf_core.config.stages.evaluation import EvaluationConfig

OPTIMIZER = {"learning_rate": 1e-3}
EXACT = {"type": "verifier"}


def rl(block: str, **settings: Any) -> RLConfig:
    settings = {"rewards": {"exact": EXACT}, "optimizer": OPTIMIZER, **settings}
    if block == "ppo":
        settings["critic"] = {"optimizer": OPTIMIZER}
    return RLConfig.model_validate({
        "algorithm": block, block: settings, "dataset": "d", "steps": 1, "prompts_per_step": 1,
        "sampling": {"max_tokens": 8}, "rollout": {"max_length": 16},
    })  # fmt: skip


JUDGE = {"type": "judge", "url": "http://a.b", "model": "m", "pattern": "(.*)", "template": "{{ completion }}"}


def refused(block: str, **settings: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        rl(block, **settings)
    return str(caught.value)


def settings_of(block: str, **settings: Any) -> AlgorithmConfig:
    return rl(block, **settings).settings


def test_rewards_have_names_and_weights() -> None:
    both = {"exact": EXACT, "taste": {"type": "reward_model", "weight": 0.5}}
    settings = settings_of("ppo", rewards=both)
    assert {name: reward.weight for name, reward in settings.rewards.items()} == {"exact": 1.0, "taste": 0.5}
    assert list(settings.model_rewards) == ["taste"]
    assert list(settings.driver_rewards) == ["exact"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": {}}, "at least 1 item"),
        ({"rewards": {"exact": {**EXACT, "weight": float("inf")}}}, "from -1000000 to 1000000"),
        ({"filtering": {"low": 0.5, "high": 0.5}}, "low=0.5 must be less than high=0.5"),
        ({"filtering": {"score": "exat"}}, "filtering.score is exat; of `rewards`, those that may give scores: exact"),
        (
            {"filtering": {}, "rewards": {"a": {"type": "verifier"}, "b": {"type": "verifier"}}},
            "filtering looks at one score, and a, b give one each: set filtering.score",
        ),
        ({"filtering": {"max_rounds": 257}}, "from 1 to 256"),
        ({"filtering": {"oversampling": 0.5}}, "from 1 to 100"),
        (
            {"filtering": {}, "rewards": {"taste": {"type": "reward_model"}}},
            "`threshold` or `scored`, and no other does: of `rewards` there is taste (reward_model); add one",
        ),
        (
            {"filtering": {}, "rewards": {"judge": JUDGE}},
            "`threshold` or `scored`, and no other does: of `rewards` there is judge (judge); add one",
        ),
        (
            {"filtering": {"score": "judge"}, "rewards": {"judge": JUDGE, "exact": EXACT}},
            "filtering.score is judge; of `rewards`, those that may give scores: exact",
        ),
        (
            {"filtering": {"low": 0.5}, "group_size": 2},
            "filtering keeps mean scores between low=0.5 and high=1, but those of group_size=2 completions",
        ),
        (
            {"filtering": {"low": 0.5}, "group_size": 2, "rewards": {"right": {**EXACT, "kind": "math"}}},
            "filtering keeps mean scores between low=0.5 and high=1, but those of group_size=2 completions",
        ),
        (
            {"rewards": {"right": {**EXACT, "kind": "math", "memory_gib": 1.0}}},
            "`memory_gib` is for kind: code_tests, and this is math: remove it",
        ),
        (
            {"rewards": {"right": {**EXACT, "modules": ("numpy",)}}},
            "`modules` is for kind: code_tests, and this is exact",
        ),
        ({"rewards": {"right": {**EXACT, "kind": "maths"}}}, "Input should be 'exact', 'math', 'code_tests' or"),
        (
            {"rewards": {"judge": {**JUDGE, "verdicts": {"good": 1, "bad": 1}}}},
            "verdicts: good, bad all have the reward 1, so nothing is judged: give them different ones",
        ),
        (
            {"rewards": {"judge": {**JUDGE, "range": [0, 1], "verdicts": {"good": 2}}}},
            "verdicts.good is 2, which is not from 0 to 1 (`range`): correct one",
        ),
        ({"shaping": {"clip": (1.0, 1.0)}}, "clip is [1, 1]: the first must be less than the second"),
        ({"shaping": {"truncation": {}}}, "give either `factor` or `reward`"),
        ({"shaping": {"truncation": {"factor": 0.5, "reward": 0.0}}}, "give either `factor` or `reward`"),
        ({"shaping": {"overlong": {"buffer": 9}}}, "shaping.overlong.buffer is 9, more than sampling.max_tokens=8"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    assert message in refused("grpo", **settings)


def test_filtering_needs_groups() -> None:
    assert "group_size is 1" in refused("ppo", filtering={})
    assert settings_of("ppo", filtering={}, group_size=2).filtering is not None


@pytest.mark.parametrize("block", ["rloo", "gspo", "cispo"])
def test_rewards_of_steps_are_refused_where_they_cannot_be_used(block: str) -> None:
    rewards = {"steps": {"type": "process_reward_model"}}
    assert "rewards.steps rewards single steps, which this algorithm cannot use" in refused(block, rewards=rewards)
    assert list(settings_of("grpo", rewards=rewards).model_rewards) == ["steps"]


def test_dapo_filters_unless_it_is_told_not_to() -> None:
    filtering = settings_of("dapo").filtering
    assert filtering is not None
    assert (filtering.low, filtering.high, filtering.when_short) == (0.0, 1.0, "train")
    assert settings_of("dapo", filtering=None).filtering is None
    assert settings_of("grpo").filtering is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one of `url`, `urls` and `url_variable`"),
        ({"url": "http://a.b", "url_variable": "A"}, "give one of `url`, `urls` and `url_variable`"),
        ({"urls": ["http://a.b", "a.b"]}, "the URL must begin with http:// or https://"),
        ({"url": "http://a.b", "query": "{{ completion }}"}, "`query` is sent in the form `openrlhf` only"),
        (
            {"url": "http://a.b", "form": "openrlhf", "query": "{{ text }}"},
            "the template names `text`; there are prompt,",
        ),
        (
            {"url": "http://a.b", "form": "openrlhf", "query": "{{ prompt }}"},
            "the template does not name `completion`, so it would not be judged: add it",
        ),
        ({"url": "http://a.b", "form": "openrlhf", "query": "{% if %}"}, "syntax error in line 1 of the template"),
        ({"url": "a.b:80/score"}, "the URL must begin with http:// or https://"),
        ({"url": "https://"}, "name a host"),
        ({"url": "http://me:secret@a.b"}, "the URL holds a user or password"),
        ({"url": "http://a..b/score"}, "no host can be called 'a..b': each part of it has 1 to 63 characters"),
    ],
)
def test_a_reward_server_has_one_url_without_secrets(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        HTTPReward.model_validate_json(json.dumps({"type": "http", **settings}))
    assert message in str(caught.value)


def test_how_often_a_server_is_tried_is_no_part_of_the_result() -> None:
    http = TypeAdapter(RewardConfig).validate_python({"type": "http", "url": "http://a.b", "attempts": 9})
    assert result_settings(http).keys() == {
        "weight", "tolerated_failures", "type", "url", "urls", "url_variable", "header_variable", "timeout_seconds",
        "batch_size", "form", "query",
    }  # fmt: skip


def test_a_scorer_has_no_weight() -> None:
    scorers = {"exact": {**EXACT, "weight": 2.0}}
    with pytest.raises(ValidationError, match="a scorer is never summed with another: remove `weight`"):
        EvaluationConfig.model_validate({
            "dataset": "d", "scorers": scorers, "sampling": {"max_tokens": 8}, "rollout": {"max_length": 16},
        })  # fmt: skip


def test_a_judge_scores_by_its_range() -> None:
    assert TypeAdapter(ScorerConfig).validate_python({**JUDGE, "range": [0, 1]}).bounds == (0, 1)
    assert TypeAdapter(MonitorConfig).validate_python(JUDGE).bounds is None  # its rewards are logged
    with pytest.raises(ValidationError, match=r"`judge` gives scores from 0 to 1 by its `range` alone: set it"):
        TypeAdapter(ScorerConfig).validate_python(JUDGE)


def test_no_option_has_the_name_of_what_every_call_passes() -> None:
    with pytest.raises(
        ValidationError, match=r"options\.rows: every call gives `reward` its own `rows` \(as it does co"
    ):
        FunctionReward(type="function", path="reward.py", options={"limit": 1, "rows": 2})
    with pytest.raises(ValidationError, match=r"options\.api_key: every call gives `run` its own `api_key`"):
        AgentEnvironment(type="agent", path="agent.py", options={"api_key": "x"})


def test_a_variable_of_a_function_is_a_name_of_the_environment() -> None:
    with pytest.raises(ValidationError, match="'A=B' is not the name of an environment variable"):
        FunctionReward(type="function", path="reward.py", variables=("A=B",))


@pytest.mark.parametrize(
    "variable", ["PREFECT_API_AUTH_STRING", "JUDGE_HEADER", "ALIGNMENT_HEADER_", "alignment_header_a"]
)
@pytest.mark.parametrize("settings", [
    lambda header: HTTPReward(type="http", url="http://a.b", header_variable=header),
    lambda header: JudgeReward(
        type="judge", url="http://a.b", model="m", template="{{ completion }}", pattern="(.)", header_variable=header
    ),
    lambda header: NemoGymEnvironment(type="nemo_gym", url="http://a.b", header_variable=header),
])  # fmt: skip
def test_a_recipe_cannot_have_any_variable_sent_to_the_server_that_it_names(
    settings: Callable[[str], ServerConfig], variable: str
) -> None:
    with pytest.raises(ValidationError, match=f"set ALIGNMENT_HEADER_{variable} to the header, and name that"):
        settings(variable)
    assert [*settings("ALIGNMENT_HEADER_JUDGE").named_variables()] == ["ALIGNMENT_HEADER_JUDGE"]


@pytest.mark.parametrize("file", ["../secret.py", "/etc/passwd", "code/../../x.py", "other/x.py", "code", "code/", "."])
def test_files_of_a_function_are_beside_it(file: str) -> None:
    with pytest.raises(ValidationError, match=r"must be a file in the folder of code/reward\.py, or in one below it"):
        FunctionReward(type="function", path="code/reward.py", files=(file,))
    assert FunctionReward(type="function", path="../reward.py", files=("../kit/x.py",)).named_files()[1:] == (
        "../kit/x.py",
    )


def test_every_kind_of_verifier_can_be_named_and_is_implemented() -> None:
    assert get_args(VerifierReward.model_fields["kind"].annotation) == tuple(VERIFIERS)
    for kind, entry in VERIFIERS.items():
        config = VerifierReward.model_validate({"type": "verifier", "kind": kind})
        assert config.row_columns == entry.row_columns
        assert callable(resolve_name(entry.implementation).of)


def test_limits_of_code_are_in_a_key_where_they_differ_from_the_default() -> None:
    code = VerifierReward.model_validate({"type": "verifier", "kind": "code_tests", "modules": ("numpy",)})
    assert result_settings(code).keys() - result_settings(VerifierReward(type="verifier")).keys() == {"modules"}
