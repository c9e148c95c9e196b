from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_core.losses.policy import clipped_policy_loss


def _loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, num_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    return clipped_policy_loss(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.3, num_tokens=num_tokens)


def test_worked_by_hand() -> None:
    # Ratios 1.5, 1.5, 0.5, 0.5 with advantages 2, -2, 2, -2, and one token that is not trained.
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 3.0])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 100.0])
    mask = torch.tensor([True, True, True, True, False])
    logprobs = ratios.log().requires_grad_()
    loss, metrics = _loss(logprobs, torch.zeros(5), advantages, mask, 4)
    # Kept: 1.3 * 2 (clipped), 1.5 * -2, 0.5 * 2, 0.8 * -2 (clipped)
    assert loss.item() == pytest.approx(-(2.6 - 3.0 + 1.0 - 1.6) / 4)
    assert metrics["clipped_tokens"].item() == 2
    expected_kl = 2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))
    assert metrics["approx_kl_sum"].item() == pytest.approx(expected_kl, abs=1e-6)
    loss.backward()
    assert logprobs.grad is not None
    # d/dlogp = -ratio * advantage / 4 where the clip is not active, else none.
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.75, -0.25, 0.0, 0.0])


def test_at_ratio_one_it_is_the_policy_gradient() -> None:
    torch.manual_seed(0)
    logprobs = (-torch.rand(6)).requires_grad_()
    advantages = torch.randn(6)
    loss, metrics = _loss(logprobs, logprobs.detach(), advantages, torch.ones(6, dtype=torch.bool), 6)
    loss.backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -advantages / 6)
    assert metrics["clipped_tokens"].item() == metrics["approx_kl_sum"].item() == 0.0


def test_two_halves_sum_to_the_whole() -> None:
    torch.manual_seed(1)
    logprobs, old, advantages = torch.randn(8), torch.randn(8), torch.randn(8)
    mask = torch.tensor([True, False, True, True, True, True, False, True])
    whole, _ = _loss(logprobs, old, advantages, mask, 6)
    halves = [_loss(logprobs[s], old[s], advantages[s], mask[s], 6)[0] for s in (slice(0, 3), slice(3, 8))]
    assert (halves[0] + halves[1]).item() == pytest.approx(whole.item(), abs=1e-6)


def test_no_overflow_and_no_trained_token() -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    mask = torch.tensor([True, True])
    loss, _ = _loss(logprobs, torch.tensor([-200.0, 200.0]), torch.tensor([-1.0, -1.0]), mask, 2)
    assert torch.isfinite(loss)
    empty, _ = _loss(logprobs, torch.zeros(2), torch.ones(2), ~mask, 2)
    empty.backward()
    assert empty.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]
