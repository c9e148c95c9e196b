from __future__ import annotations

import pytest
import torch

from rlhf_core.losses.supervised import next_token_loss


def test_worked_by_hand_with_its_gradient() -> None:
    logprobs = torch.tensor([0.0, -1.0, -2.0, -5.0], requires_grad=True)
    mask = torch.tensor([False, True, True, False])
    loss = next_token_loss(logprobs, mask, num_tokens=6)
    assert loss.item() == pytest.approx(0.5)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1 / 6, -1 / 6, 0.0])
