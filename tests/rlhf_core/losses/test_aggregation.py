from __future__ import annotations

import pytest
import torch

from rlhf_core.losses.aggregation import Aggregation, loss_weights

# Three sequences of 3, 2 and 4 tokens; 2, 0 and 3 of them are trained, the last with a gap.
MASK = torch.tensor([False, True, True, False, False, True, False, True, True])
LENGTHS = torch.tensor([3, 2, 4])


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("token", 1 / 5, 1 / 5),
        ("sequence", 1 / (2 * 2), 1 / (3 * 2)),  # a sequence without trained tokens has no mean
        ("constant", 1 / (3 * 10), 1 / (3 * 10)),  # but its sum is 0
    ],
)
def test_worked_by_hand(kind: Aggregation, first: float, last: float) -> None:
    weights = loss_weights(MASK, LENGTHS, kind, length=10)
    assert weights.tolist() == pytest.approx([0, first, first, 0, 0, last, 0, last, last])


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_a_mean_of_ones_is_one(kind: Aggregation) -> None:
    assert loss_weights(MASK, LENGTHS, kind, length=10).sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_nothing_trained_weighs_nothing(kind: Aggregation) -> None:
    weights = loss_weights(torch.zeros(4, dtype=torch.bool), torch.tensor([1, 3]), kind, length=10)
    assert weights.tolist() == [0.0] * 4
