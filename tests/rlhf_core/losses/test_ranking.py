from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.losses.ranking import pairwise_loss


def test_worked_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([0.5, 1.0, 1.0])
    margins = torch.tensor([0.5, 0.0, 0.0])
    loss, metrics = pairwise_loss(chosen, rejected, margins, num_pairs=6)
    expected = math.log(1 + math.exp(-1.0)) + math.log(1 + math.e) + math.log(2)
    assert loss.item() == pytest.approx(expected / 6)
    assert metrics["accuracy"].value.item() == pytest.approx(1 / 6)  # the tie is not correct
    assert metrics["reward_gap"].value.item() == pytest.approx(0.5 / 6)


def test_centring_worked_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.5], requires_grad=True), torch.tensor([1.0, -0.5])
    loss, _ = pairwise_loss(chosen, rejected, torch.zeros(2), num_pairs=4, centring=0.1)
    assert loss.item() == pytest.approx((0.1 * 9 + 2 * math.log1p(math.exp(-1))) / 4)
    loss.backward()
    assert chosen.grad is not None
    slope = -1 / (1 + math.e)
    assert chosen.grad.tolist() == pytest.approx([(0.2 * 3 + slope) / 4, slope / 4])


def test_it_is_the_log_of_one_plus_exp() -> None:
    """Both names of the setting `loss` mean this function."""
    gap = torch.linspace(-20, 20, 101)
    for difference in gap:
        loss, _ = pairwise_loss(difference[None], torch.zeros(1), torch.zeros(1), num_pairs=1)
        assert loss.item() == pytest.approx(math.log1p(math.exp(-difference.item())), rel=1e-5)


def test_no_difference_overflows() -> None:
    chosen = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss, _ = pairwise_loss(chosen, torch.zeros(2), torch.zeros(2), num_pairs=1)
    assert loss.item() == pytest.approx(500.0)
    loss.backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-1.0, 0.0])


def test_no_pair_is_no_loss() -> None:
    nothing = torch.zeros(0)
    assert pairwise_loss(nothing, nothing, nothing, num_pairs=4)[0].item() == 0.0
