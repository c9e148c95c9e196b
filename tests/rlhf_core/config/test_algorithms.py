"""The blocks of the RL algorithms: defaults as in the papers, and one sentence for each invalid setting."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.base import result_settings
from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.config.rl.kl import KLConfig
from rlhf_core.config.rl.stage import RLConfig

NAMES = tuple(ALGORITHMS)
OPTIMIZER = {"learning_rate": 1e-3}
EXACT = {"exact": {"type": "verifier"}}
GROUPS = tuple(name for name in NAMES if name not in ("ppo", "reinforce++", "on-policy-distillation"))


def config(name: str, rl: dict[str, Any] | None = None, **block: Any) -> RLConfig:
    settings = {"rewards": {"exact": {"type": "verifier"}}, "optimizer": OPTIMIZER, **block}
    if name == "ppo":
        settings = {"critic": {"optimizer": OPTIMIZER}, **settings}
    if name == "on-policy-distillation":
        settings = {"teacher": {"model": "t"}, **settings, "rewards": block.get("rewards", {})}
    return RLConfig.model_validate({
        "algorithm": name, ALGORITHMS[name].block: settings, "dataset": "d", "steps": 3, "prompts_per_step": 4,
        "sampling": {"max_tokens": 8}, "rollout": {"max_length": 16}, **(rl or {}),
    })  # fmt: skip


def problem(name: str, rl: dict[str, Any] | None = None, **block: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        config(name, rl, **block)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "group_size", "aggregation", "clip", "kl"),
    [
        ("ppo", 1, "token", (0.2, 0.2), ("k1", "reward")),
        ("reinforce++", 1, "token", (0.2, 0.2), ("k1", "reward")),
        ("reinforce++-baseline", 8, "token", (0.2, 0.2), ("k2", "loss")),
        ("rloo", 8, "constant", (0.2, 0.2), ("k1", "reward")),
        ("grpo", 8, "sequence", (0.2, 0.2), ("k3", "loss")),
        ("dr-grpo", 8, "constant", (0.2, 0.2), ("k3", "loss")),
        ("dapo", 8, "token", (0.2, 0.28), ("k3", "loss")),
        ("gdpo", 8, "sequence", (0.2, 0.2), ("k3", "loss")),
        ("gspo", 8, "sequence", (3e-4, 4e-4), ("k3", "loss")),
        ("cispo", 8, "token", (1.0, 4.0), ("k3", "loss")),
        ("on-policy-distillation", 1, "token", (0.2, 0.2), ("k1", "reward")),
        ("gmpo", 8, "sequence", (0.4, 0.4), ("k3", "loss")),
        ("dppo", 8, "sequence", (0.15, 0.15), ("k3", "loss")),
        ("sapo", 8, "sequence", (None, None), ("k3", "loss")),
    ],
)
def test_defaults_are_the_papers(
    name: str, group_size: int, aggregation: str, clip: tuple[float | None, float | None], kl: tuple[str, str]
) -> None:
    # A block of its own keeps the algorithm's estimator and place: setting the coefficient changes no other default.
    settings = config(name, kl={"coefficient": 0.1}).settings
    assert (settings.group_size, settings.aggregation) == (group_size, aggregation)
    assert (settings.clip_low, settings.clip_high) == clip
    assert (settings.kl.estimator, settings.kl.place) == kl
    assert (config(name).settings.kl.estimator, config(name).settings.kl.coefficient) == (kl[0], 0.0)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_one_has_nothing_to_compare(name: str) -> None:
    assert "group_size is 1" in problem(name, group_size=1)


def test_minibatches_divide_the_completions_of_a_step() -> None:
    assert config("grpo", group_size=6, minibatches=8).settings.minibatches == 8
    assert "grpo.minibatches is 5, which does not divide the 24 completions of a step" in problem(
        "grpo", group_size=6, minibatches=5
    )
    assert "reinforce_plus_plus.minibatches is 3, which does not divide the 4" in problem("reinforce++", minibatches=3)


@pytest.mark.parametrize(
    ("name", "block", "sentence"),
    [
        ("grpo", {"dual_clip": 1.0}, "more than 1 and at most 1000"),
        ("cispo", {"dual_clip": 2.0}, "Input should be None"),
        ("grpo", {"kl": {"target": 6.0}}, "target is set, but coefficient is 0 and would stay 0"),
        ("grpo", {"aggregation_length": 64}, "aggregation_length is set, but aggregation is sequence"),
        ("ppo", {"critic": {"optimizer": OPTIMIZER, "warmup_steps": 3}}, "ppo.critic.warmup_steps is 3 of 3 steps"),
        ("grpo", {"mismatch": {"correction": "truncate", "low": 1.0, "high": 1.0}}, "low is 1 and high is 1"),
        ("grpo", {"mismatch": {"correction": "token_filter", "ratio_of": "sequence", "low": 0.5, "high": 2.0}},
         "ratio_of has no effect with token_filter: remove it, or use truncate or mask"),
        ("gspo", {"mismatch": {"correction": "truncate", "low": 0.0, "high": 2.0}}, "judges whole completions"),
        ("grpo", {"divide_by_deviation": "group"}, "False, True or 'batch'"),
        ("grpo", {"divide_by_deviation": 1}, "must not be a number"),
        ("grpo", {"aggregation": "tokens"}, "'token', 'sequence' or 'constant'"),
        ("on-policy-distillation", {"rewards": EXACT}, "group_size is 1, but `rewards` compare"),
        ("on-policy-distillation", {"cross_entropy": {"coefficient": 1.0, "least_reward": 1.0}}, "there are no"),
        ("on-policy-distillation", {"shaping": {"overlong": {"buffer": 4}}}, "group_size is 1, but `shaping` changes"),
        ("on-policy-distillation", {"filtering": {}, "group_size": 2}, "filtering needs a reward that gives scores"),
        ("grpo", {"rewards": {}}, "at least 1"),
        ("grpo", {"teacher": {"model": "t", "offload": True, "placement": {}}}, "remove one of them"),
        ("rloo", {"rewards": {"p": {"type": "process_reward_model"}}}, "rewards.p rewards single steps"),
        ("cispo", {"rewards": {"p": {"type": "process_reward_model"}}}, "rewards.p rewards single steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(name: str, block: dict[str, Any], sentence: str) -> None:
    assert sentence in problem(name, **block)


@pytest.mark.parametrize("name", ["ppo", "reinforce++", "grpo", "dr-grpo", "dapo"])
def test_rewards_of_steps_are_taken(name: str) -> None:
    rewards = {"steps": {"type": "process_reward_model"}}
    assert config(
        name, rewards=rewards, **({"filtering": None} if name == "dapo" else {})
    ).settings.takes_process_rewards


@pytest.mark.parametrize("name", NAMES)
def test_only_the_chosen_block_is_part_of_the_result(name: str) -> None:
    other = "grpo" if name != "grpo" else "rloo"
    block = {"rewards": {"exact": {"type": "verifier"}}, "optimizer": OPTIMIZER}
    assert not {"teacher", "cross_entropy"} & set(result_settings(config("grpo"))["grpo"]), (
        "keys of results from before"
    )
    assert result_settings(config(name)) == result_settings(config(name, rl={other: block}))
    assert result_settings(config(name)) != result_settings(config(name, epochs=2))


@pytest.mark.parametrize("name", NAMES)
def test_a_chosen_block_must_be_there(name: str) -> None:
    expected = f"algorithm is {name}, but there is no block `{ALGORITHMS[name].block}` beside it; add one"
    assert expected in problem(name, rl={ALGORITHMS[name].block: None})


def test_an_adaptive_coefficient_starts_somewhere() -> None:
    assert KLConfig(coefficient=0.1, target=6.0).horizon == 10
