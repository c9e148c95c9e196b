from __future__ import annotations

import pytest
import torch

from rlhf_core.losses.value import clipped_value_loss

TRAINED = torch.tensor([True, True, True, False])
OLD = torch.zeros(4)
WEIGHTS = torch.full((4,), 1 / 3)
RETURNS = torch.tensor([1.0, 1.0, 1.0, 1.0])


def test_worked_by_hand() -> None:
    values = torch.tensor([0.1, 0.9, -0.5, 7.0], requires_grad=True)
    loss, metrics = clipped_value_loss(values, OLD, RETURNS, TRAINED, WEIGHTS, clip=0.2)
    # 0.1: inside the clip, error .9. 0.9: clipped to 0.2, whose error .8 is larger. -0.5: its own error 1.5 is larger.
    assert loss.item() == pytest.approx(0.5 * (0.81 + 0.64 + 2.25) / 3)
    assert metrics["value_clip_fraction"].value.item() == 1
    assert metrics["critic_squared_error"].value.item() == pytest.approx(0.81 + 0.01 + 2.25)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9 / 3, 0.0, -1.5 / 3, 0.0])


def test_without_clip_it_is_half_the_squared_error() -> None:
    values = torch.tensor([0.0, 3.0, 1.0, 7.0])
    loss, metrics = clipped_value_loss(values, OLD, RETURNS, TRAINED, WEIGHTS, clip=None)
    assert loss.item() == pytest.approx(0.5 * (1 + 4 + 0) / 3)
    assert metrics["value_clip_fraction"].value.item() == 0
