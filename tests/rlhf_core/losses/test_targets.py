from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.losses.targets import regression_loss, step_loss


def test_steps_worked_by_hand() -> None:
    rewards = torch.tensor([1.5, -2.0, 0.3, 0.0], requires_grad=True)
    labels = torch.tensor([1.0, 0.0, 0.25, 1.0])
    loss, metrics = step_loss(rewards, labels, num_steps=8)
    chances = [1 / (1 + math.exp(-reward)) for reward in rewards.tolist()]
    expected = [y * math.log(p) + (1 - y) * math.log(1 - p) for p, y in zip(chances, labels.tolist(), strict=True)]
    assert loss.item() == pytest.approx(-sum(expected) / 8)
    loss.backward()  # type: ignore[no-untyped-call]
    assert rewards.grad is not None
    slopes = [(p - y) / 8 for p, y in zip(chances, labels.tolist(), strict=True)]
    assert rewards.grad.tolist() == pytest.approx(slopes)
    assert metrics["accuracy"].value.item() == 2 / 8  # 0.3 says right of a step that is not, 0 says nothing
    assert metrics["positive_share"].value.item() == 2 / 8


def test_a_label_of_one_half_pulls_to_0_and_costs_as_much_from_both_sides() -> None:
    rewards = torch.tensor([-3.0, 0.0, 3.0], requires_grad=True)
    losses = [step_loss(reward[None], torch.tensor([0.5]), num_steps=1)[0] for reward in rewards]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    assert rewards.grad is not None
    assert rewards.grad[1] == 0.0
    assert rewards.grad[0] == pytest.approx(-rewards.grad[2].item())
    assert losses[1].item() == pytest.approx(math.log(2))
    assert losses[0].item() == pytest.approx(losses[2].item())
    assert losses[0].item() > math.log(2)


def test_no_reward_overflows() -> None:
    rewards = torch.tensor([-500.0, 500.0, 500.0], requires_grad=True)
    loss, _ = step_loss(rewards, torch.tensor([1.0, 1.0, 0.0]), num_steps=1)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 1000.0
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [-1.0, 0.0, 1.0]


def test_regression_worked_by_hand() -> None:
    rewards = torch.tensor([1.5, -2.0], requires_grad=True)
    loss, metrics = regression_loss(rewards, torch.tensor([1.0, 0.0]), num_completions=4)
    assert loss.item() == (0.25 + 4.0) / 4
    assert metrics["absolute_error"].value.item() == (0.5 + 2.0) / 4
    loss.backward()  # type: ignore[no-untyped-call]
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [2 * 0.5 / 4, -2 * 2.0 / 4]
