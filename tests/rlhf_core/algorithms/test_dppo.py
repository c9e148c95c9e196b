"""DPPO against the formula of its paper, token by token in float64, and its limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.types import Minibatch
from tests.rlhf_core.algorithms.batches import completions, drifted, gradients, require_equal, rl_config


def by_the_paper(e: Minibatch, logprobs: Tensor, low: float, high: float) -> tuple[Tensor, int]:
    """Minus the mean over completions of the means over their tokens of M r A, and the number of tokens with M = 0:
    A > 0, r > 1 and D > high, or A < 0, r < 1 and D > low, where D is the total variation of (p, 1 - p)."""
    of_completions, masked = [], 0
    for tokens in completions(e, logprobs):
        total = torch.zeros((), dtype=torch.float64)
        for token in tokens:
            ratio = (token.now - token.by_engine).exp()
            p, q = token.now.exp().item(), token.by_engine.exp().item()
            variation = (abs(p - q) + abs((1 - p) - (1 - q))) / 2
            up = token.advantage > 0 and ratio.item() > 1 and variation > high
            down = token.advantage < 0 and ratio.item() < 1 and variation > low
            masked += up or down
            if not (up or down):
                total = total + ratio * token.advantage
        of_completions.append(total / len(tokens))
    return -sum(of_completions, torch.zeros((), dtype=torch.float64)) / len(of_completions), masked


def likely(e: Minibatch) -> Minibatch:
    """With probabilities of 0.2 to 0.9 by the engine, of which a change can be large."""
    spread = torch.linspace(0.2, 0.9, len(e.rollout_logprobs), dtype=torch.float64)
    return replace(e, rollout_logprobs=torch.where(e.loss_mask, spread.log(), 0.0))


def at(e: Minibatch, change: float) -> Tensor:
    """Log-probs of a policy whose probabilities are by turns higher and lower by `change`, times 1 to 2."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(e.rollout_logprobs))[: len(e.rollout_logprobs)]
    moved = e.rollout_logprobs.exp() + change * signs * torch.linspace(1, 2, len(signs), dtype=torch.float64)
    return moved.clamp(0.01, 0.99).log().requires_grad_()


@pytest.mark.parametrize(("low", "high"), [(0.15, 0.15), (0.05, 0.3), (0.3, 0.05)])
@pytest.mark.parametrize("change", [0.0, 0.08, 0.2])
def test_loss_and_gradient_are_those_of_the_paper(change: float, low: float, high: float) -> None:
    algorithm, e, _ = drifted("dppo", 0.0, clip_low=low, clip_high=high)
    e = likely(e)
    logprobs = at(e, change)
    found, metrics = algorithm.policy_loss(logprobs, None, e, 0.0)
    wanted, masked = by_the_paper(e, logprobs, low, high)
    require_equal(found, wanted, of=logprobs)
    assert float(metrics["clip_fraction"].value) == masked
    assert (masked > 0) == (change > 0.08 or (change, min(low, high)) == (0.08, 0.05))


def test_without_a_mask_it_is_importance_sampling_from_the_engine() -> None:
    algorithm, e, logprobs = drifted("dppo", 0.5, clip_low=1.0, clip_high=1.0, max_ratio=1000.0)
    loss, _ = algorithm.policy_loss(logprobs, None, e, 0.0)
    means = [torch.stack([t.advantage * (t.now - t.by_engine).exp() for t in tokens]).mean()
             for tokens in completions(e, logprobs)]  # fmt: skip
    torch.testing.assert_close(*gradients(loss, -torch.stack(means).mean(), of=logprobs), rtol=1e-6, atol=1e-12)


def test_where_engine_and_trainer_agree_and_nothing_is_clipped_it_is_grpo() -> None:
    (dppo, e, logprobs), (grpo, _, _) = drifted("dppo", 0.02), drifted("grpo", 0.02)
    assert e.old_logprobs is not None
    e = replace(e, rollout_logprobs=e.old_logprobs)
    losses = [algorithm.policy_loss(logprobs, None, e, 0.0)[0] for algorithm in (dppo, grpo)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(*gradients(*losses, of=logprobs), rtol=1e-12, atol=0)


def test_a_rare_token_may_multiply_its_probability_where_grpo_has_no_gradient() -> None:
    """From 1e-4 to 1e-3: ten times as much, and 0.0009 more."""
    (dppo, e, logprobs), (grpo, _, _) = drifted("dppo", 0.0), drifted("grpo", 0.0)
    first = 2  # of a completion with a positive advantage
    old = logprobs.detach().clone()
    old[first] = torch.tensor(1e-4).log()
    e = replace(e, rollout_logprobs=old, old_logprobs=old)
    moved = old.clone()
    moved[first] = torch.tensor(1e-3).log()
    moved.requires_grad_()
    losses = [algorithm.policy_loss(moved, None, e, 0.0)[0] for algorithm in (dppo, grpo)]
    free, clipped = (float(gradient[first]) for gradient in gradients(*losses, of=moved))
    assert free == pytest.approx(-10 * float(e.advantages[first]) / 8, rel=1e-5)  # one of 4 completions, of 2 tokens
    assert clipped == 0.0


def test_a_ratio_counts_at_most_as_much_as_allowed() -> None:
    algorithm, e, logprobs = drifted("dppo", 0.0, max_ratio=3.0)
    first = 2
    rollout = logprobs.detach().clone()
    rollout[first] -= 5.0  # the ratio is 148
    e = replace(e, rollout_logprobs=torch.where(e.loss_mask, rollout, 0.0))
    with torch.no_grad():
        logprobs[first] -= 9.0  # and the probability is low, so that nothing is masked
        e.rollout_logprobs[first] -= 9.0
    (found,) = gradients(algorithm.policy_loss(logprobs, None, e, 0.0)[0], of=logprobs)
    assert float(found[first]) == pytest.approx(-3.0 * float(e.advantages[first]) / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dual_clip": 3.0}, "Input should be None"),
        ({"mismatch": {"correction": "truncate", "low": 0.0, "high": 2.0}}, "Input should be None"),
        ({"clip_high": 1.5}, "at most 1: it is a share of 1"),
        ({"max_ratio": 0.5}, "from 1 to 1000"),
        ({"rewards": {"p": {"type": "process_reward_model"}}}, "rewards.p rewards single steps"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rl_config("dppo", **settings)
