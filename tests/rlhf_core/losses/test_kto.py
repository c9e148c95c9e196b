from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.losses.kto import kto_loss


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_worked_by_hand() -> None:
    ratios = torch.tensor([1.5, -2.0, 0.4], requires_grad=True)
    desirable = torch.tensor([True, True, False])
    losses = kto_loss(ratios, 0.6, desirable, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    expected = [2 * (1 - sigmoid(0.45)), 2 * (1 - sigmoid(-1.3)), 3 * (1 - sigmoid(0.1))]
    assert losses.tolist() == pytest.approx(expected)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert ratios.grad is not None
    slopes = [-2 * 0.5 * sigmoid(0.45) * sigmoid(-0.45), -2 * 0.5 * sigmoid(-1.3) * sigmoid(1.3),
              3 * 0.5 * sigmoid(0.1) * sigmoid(-0.1)]  # fmt: skip
    assert ratios.grad.tolist() == pytest.approx(slopes)


def test_a_policy_at_its_reference_is_undecided() -> None:
    losses = kto_loss(
        torch.zeros(2), 0.0, torch.tensor([True, False]), beta=0.1, desirable_weight=1.0, undesirable_weight=4.0
    )
    assert losses.tolist() == [0.5, 2.0]


def test_without_beta_nothing_is_learned() -> None:
    ratios = torch.tensor([1.5, -2.0], dtype=torch.float64, requires_grad=True)
    losses = kto_loss(ratios, 0.6, torch.tensor([True, False]), beta=1e-9, desirable_weight=1.0, undesirable_weight=1.0)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses.tolist() == pytest.approx([0.5, 0.5])
    assert ratios.grad is not None
    assert ratios.grad.tolist() == pytest.approx([-0.25e-9, 0.25e-9])


def test_no_ratio_overflows() -> None:
    ratios = torch.tensor([-3e3, 3e3], requires_grad=True)
    losses = kto_loss(ratios, 0.0, torch.tensor([True, True]), beta=1.0, desirable_weight=1.0, undesirable_weight=1.0)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses.tolist() == [1.0, 0.0]
    assert ratios.grad is not None
    assert ratios.grad.tolist() == [0.0, 0.0]
