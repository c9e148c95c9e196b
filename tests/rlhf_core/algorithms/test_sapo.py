"""SAPO against the formula of its paper, token by token in float64, and its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.types import Minibatch
from tests.rlhf_core.algorithms.batches import completions, drifted, gradients, require_equal, rl_config


def by_the_paper(e: Minibatch, logprobs: Tensor, positive: float, negative: float) -> Tensor:
    """Minus the mean over completions of the means over their tokens of sigmoid(t (r - 1)) 4 / t A."""
    of_completions = []
    for tokens in completions(e, logprobs):
        total = torch.zeros((), dtype=torch.float64)
        for token in tokens:
            ratio = (token.now - token.before).exp()
            temperature = positive if float(token.advantage) > 0 else negative
            gate = 1 / (1 + (-temperature * (ratio - 1)).exp())
            total = total + gate * 4 / temperature * token.advantage
        of_completions.append(total / len(tokens))
    return -sum(of_completions, torch.zeros((), dtype=torch.float64)) / len(of_completions)


@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (0.3, 6.0)])
@pytest.mark.parametrize("drift", [0.0, 0.5, 2.0])
def test_loss_and_gradient_are_those_of_the_paper(drift: float, positive: float, negative: float) -> None:
    algorithm, e, logprobs = drifted("sapo", drift, temperature_positive=positive, temperature_negative=negative)
    found, metrics = algorithm.policy_loss(logprobs, None, e, 0.0)
    wanted = by_the_paper(e, logprobs, positive, negative)
    require_equal(found, wanted, of=logprobs)
    halved = [
        math.cosh((positive if t.advantage > 0 else negative) * math.expm1((t.now - t.before).item()) / 2) ** -2 < 0.5
        for tokens in completions(e, logprobs)
        for t in tokens
    ]
    assert float(metrics["clip_fraction"].value) == sum(halved)


def test_near_temperature_0_it_is_grpo_without_clips() -> None:
    algorithm, e, logprobs = drifted("sapo", 2.0, temperature_positive=1e-4, temperature_negative=1e-4)
    loss, _ = algorithm.policy_loss(logprobs, None, e, 0.0)
    unclipped = [sum(t.advantage * (t.now - t.before).exp() for t in tokens) / len(tokens)
                 for tokens in completions(e, logprobs)]  # fmt: skip
    mean = torch.stack([torch.as_tensor(value) for value in unclipped]).mean()
    torch.testing.assert_close(*gradients(loss, -mean, of=logprobs), rtol=1e-4, atol=1e-8)


def test_at_the_old_policy_it_is_grpo() -> None:
    (sapo, e, logprobs), (grpo, _, _) = drifted("sapo", 0.0), drifted("grpo", 0.0)
    losses = [algorithm.policy_loss(logprobs, None, e, 0.0)[0] for algorithm in (sapo, grpo)]
    torch.testing.assert_close(*gradients(*losses, of=logprobs), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 0.2}, "Input should be None"),
        ({"clip_high": 0.2}, "Input should be None"),
        ({"dual_clip": 3.0}, "Input should be None"),
        ({"temperature_positive": 0.0}, "no token would lose its gradient"),
        ({"temperature_negative": 1001.0}, "hardly any token would have a gradient"),
        ({"rewards": {"p": {"type": "process_reward_model"}}}, "rewards.p rewards single steps"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rl_config("sapo", **settings)
