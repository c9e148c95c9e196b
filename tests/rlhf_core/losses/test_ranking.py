from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.losses.ranking import PairwiseLoss, pairwise_loss

KINDS: tuple[PairwiseLoss, ...] = ("sigmoid", "logexp")


@pytest.mark.parametrize("kind", KINDS)
def test_worked_by_hand(kind: PairwiseLoss) -> None:
    chosen, rejected = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([0.5, 1.0, 1.0])
    margins = torch.tensor([0.5, 0.0, 0.0])
    loss, metrics = pairwise_loss(chosen, rejected, margins, kind=kind, num_pairs=6)
    expected = math.log(1 + math.exp(-1.0)) + math.log(1 + math.e) + math.log(2)
    assert loss.item() == pytest.approx(expected / 6)
    assert metrics["correct_pairs"].item() == 1  # the tie is not correct
    assert metrics["reward_gap_sum"].item() == pytest.approx(0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_difference_overflows(kind: PairwiseLoss) -> None:
    chosen = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss, _ = pairwise_loss(chosen, torch.zeros(2), torch.zeros(2), kind=kind, num_pairs=1)
    assert loss.item() == pytest.approx(500.0)
    loss.backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-1.0, 0.0])


def test_no_pair_is_no_loss() -> None:
    nothing = torch.zeros(0)
    assert pairwise_loss(nothing, nothing, nothing, num_pairs=4)[0].item() == 0.0
