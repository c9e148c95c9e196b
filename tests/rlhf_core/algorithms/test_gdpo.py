"""GDPO against its formula in NumPy, in float64, and what it has in common with GRPO."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from rlhf_core.algorithms import build_algorithm
from rlhf_core.types import TrainingBatch
from tests.rlhf_core.algorithms.batches import GROUPS, LENGTHS, MASK, REWARDS, rl_config, scored

Floats = NDArray[numpy.float64]
TWO = {"exact": {"type": "verifier", "weight": 1.0}, "short": {"type": "verifier", "weight": -0.5}}
EXACT, SHORT = (1.0, 0.0, 0.5, 2.0), (10.0, 40.0, 30.0, 30.0)


def batch(by_name: dict[str, tuple[float, ...]], algorithm: str = "gdpo", **settings: Any) -> TrainingBatch:
    config = rl_config(algorithm, **settings)
    given = {name: torch.tensor(values) for name, values in by_name.items()}
    return build_algorithm(config).advantages(scored(config), torch.tensor(REWARDS), torch.tensor(GROUPS), 0.0, given)


def by_episode(found: TrainingBatch) -> list[float]:
    """The advantage of each episode, at all of its trained tokens and at no other."""
    values = []
    for tokens, mask in zip(found.advantages.split(LENGTHS), torch.tensor(MASK).split(LENGTHS), strict=True):
        assert len(set(tokens[mask].tolist())) == 1
        assert not tokens[~mask].any()
        values.append(float(tokens[mask][0]))
    return values


def group_normalised(rewards: tuple[float, ...], *, deviation: bool = True) -> Floats:
    values, groups = numpy.array(rewards, dtype=numpy.float64), numpy.array(GROUPS)
    normalised = numpy.empty_like(values)
    for group in set(GROUPS):
        own = values[groups == group]
        scale = own.std(ddof=1) + 1e-6 if deviation else 1.0
        normalised[groups == group] = (own - own.mean()) / scale
    return normalised


def over_the_batch(values: Floats) -> Floats:
    return (values - values.mean()) / values.std()


def test_two_rewards_are_normalised_each_in_its_group_then_summed() -> None:
    wanted = over_the_batch(group_normalised(EXACT) - 0.5 * group_normalised(SHORT))
    found = by_episode(batch({"exact": EXACT, "short": SHORT}, rewards=TWO))
    assert found == pytest.approx(wanted.tolist(), rel=1e-6)
    # In the second group all are equally short: that reward is 0 there, and A = 1 / sqrt 2 x (1.5, -1.5, -1, 1).
    root = (2 * (1.5**2 + 1) / 4) ** 0.5
    assert found == pytest.approx([1.5 / root, -1.5 / root, -1 / root, 1 / root], rel=1e-5)


def test_rewards_of_any_scale_count_alike() -> None:
    """GRPO normalises their sum, in which the reward of the larger spread decides."""
    thousandfold = {"exact": tuple(1000 * value for value in EXACT), "short": SHORT}
    assert by_episode(batch(thousandfold, rewards=TWO)) == pytest.approx(
        by_episode(batch({"exact": EXACT, "short": SHORT}, rewards=TWO)), rel=1e-5
    )


def test_without_the_deviation_scales_count() -> None:
    wanted = over_the_batch(group_normalised(EXACT, deviation=False) - 0.5 * group_normalised(SHORT, deviation=False))
    found = by_episode(batch({"exact": EXACT, "short": SHORT}, rewards=TWO, divide_by_deviation=False))
    assert found == pytest.approx(wanted.tolist(), rel=1e-6)


def test_each_reward_may_be_divided_by_its_deviation_over_the_step() -> None:
    def divided(rewards: tuple[float, ...]) -> Floats:
        return group_normalised(rewards, deviation=False) / (numpy.std(rewards, ddof=1) + 1e-6)

    wanted = over_the_batch(divided(EXACT) - 0.5 * divided(SHORT))
    found = by_episode(batch({"exact": EXACT, "short": SHORT}, rewards=TWO, divide_by_deviation="batch"))
    assert found == pytest.approx(wanted.tolist(), rel=1e-6)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_one_reward_is_grpo_normalised_over_the_batch(weight: float) -> None:
    rewards = {"exact": {"type": "verifier", "weight": weight}}
    ours = by_episode(batch({"exact": REWARDS}, rewards=rewards))
    grpo = by_episode(batch({"exact": REWARDS}, "grpo", rewards=rewards))
    assert ours == pytest.approx(over_the_batch(numpy.array(grpo)).tolist(), abs=1e-6)


def test_a_reward_that_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="GDPO normalises each reward: `by_name` lacks short"):
        batch({"exact": EXACT}, rewards=TWO)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shaping": {"overlong": {"buffer": 2}}}, "shaping changes the sum of rewards, and gdpo normalises each"),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, "kl.place is reward, but gdpo normalises each"),
        ({"rewards": {"p": {"type": "process_reward_model"}}}, "rewards.p rewards single steps"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rl_config("gdpo", **settings)
