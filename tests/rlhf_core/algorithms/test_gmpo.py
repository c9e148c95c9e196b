"""GMPO against the formula of its paper, token by token in float64, and its limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.types import Minibatch
from tests.rlhf_core.algorithms.batches import completions, drifted, gradients, require_equal, rl_config


def by_the_paper(e: Minibatch, logprobs: Tensor, low: float, high: float) -> Tensor:
    """Minus the mean over completions of sgn A times the |o|-th root of the product over tokens of |min(r^s A, ...)|,
    s the sign of A; the ratios between exp(-low) and exp(high)."""
    of_completions = []
    for tokens in completions(e, logprobs):
        advantage = float(tokens[0].advantage)
        sign = (advantage > 0) - (advantage < 0)
        product = torch.ones((), dtype=torch.float64)
        for token in tokens:
            ratio = (token.now - token.before).exp()
            bounded = ratio.clamp(torch.tensor(-low).exp().double(), torch.tensor(high).exp().double())
            worse = torch.minimum(ratio**sign, bounded**sign) ** sign
            product = product * worse * abs(advantage)
        of_completions.append(sign * product ** (1 / len(tokens)))
    return -sum(of_completions, torch.zeros((), dtype=torch.float64)) / len(of_completions)


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.05, 1.5)])
@pytest.mark.parametrize("drift", [0.0, 0.5, 2.0])
def test_loss_and_gradient_are_those_of_the_paper(drift: float, low: float, high: float) -> None:
    algorithm, e, logprobs = drifted("gmpo", drift, clip_low=low, clip_high=high)
    found, metrics = algorithm.policy_loss(logprobs, None, e, 0.0)
    wanted = by_the_paper(e, logprobs, low, high)
    require_equal(found, wanted, of=logprobs)
    stopped = [
        (token.now - token.before).item() > high if token.advantage > 0 else (token.now - token.before).item() < -low
        for tokens in completions(e, logprobs)
        for token in tokens
    ]
    assert float(metrics["clip_fraction"].value) == sum(stopped)
    assert (sum(stopped) > 0) == (drift > 0)


def test_a_clipped_token_has_no_gradient_and_the_others_of_its_completion_keep_theirs() -> None:
    """In GSPO the whole completion loses it."""
    algorithm, e, logprobs = drifted("gmpo", 0.0)
    first, second = 2, 3  # the trained tokens of the first completion, whose advantage is positive
    moved = logprobs.detach().clone()
    moved[first] += 0.9
    moved.requires_grad_()
    loss, _ = algorithm.policy_loss(moved, None, e, 0.0)
    (found,) = gradients(loss, of=moved)
    assert float(found[first]) == 0.0
    # Of exp((0.4 + 0) / 2) A, one of four completions, half to each of its two tokens.
    assert float(found[second]) == pytest.approx(-float(torch.tensor(0.2).exp()) * float(e.advantages[2]) / 4 / 2)


def test_without_clips_it_is_gspo_without_clips() -> None:
    (gmpo, e, logprobs), (gspo, _, _) = (
        drifted("gmpo", 0.5, clip_low=20.0, clip_high=20.0), drifted("gspo", 0.5, clip_low=1.0, clip_high=20.0),
    )  # fmt: skip
    losses = [algorithm.policy_loss(logprobs, None, e, 0.0)[0] for algorithm in (gmpo, gspo)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(*gradients(*losses, of=logprobs), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dual_clip": 3.0}, "Input should be None"),
        ({"clip_low": 0.0}, "more than 0 and at most 20"),
        ({"mismatch": {"correction": "truncate", "low": 0.0, "high": 2.0}}, "this algorithm judges whole completions"),
        ({"rewards": {"p": {"type": "process_reward_model"}}}, "rewards.p rewards single steps"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rl_config("gmpo", **settings)
