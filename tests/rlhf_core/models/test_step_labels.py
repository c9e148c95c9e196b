"""A language model as a process reward model: its log-odds are those of the two labels, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from rlhf_core.losses.targets import step_loss
from rlhf_core.models.layouts import PACKED, ROWS
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PackedModel
from rlhf_core.models.step_labels import StepLabels, TrainedStepLabels
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch

pytestmark = pytest.mark.parts

SEQUENCES = [[3, 1, 7, 1, 5, 7], [9, 2, 7], [2, 6, 5, 3, 5, 8, 9, 7]]
TAG, RIGHT, WRONG = 7, 11, 4
LABELS = torch.tensor([1.0, 0.0, 0.25, 1.0], dtype=torch.float64)  # one is a probability


def batch() -> PackedBatch:
    return pack(SEQUENCES, [[token == TAG for token in sequence] for sequence in SEQUENCES])


@pytest.fixture(params=[(ROWS, 1e-10), (PACKED, 1e-6)], ids=["rows", "one row"])
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of a layout: in one row attention has parts in float32."""
    layouts, relative = request.param
    monkeypatch.setattr(PackedModel, "layouts", layouts)
    return float(relative)


def of_two_labels(model: LlamaForCausalLM) -> Tensor:
    """As Math-Shepherd reads it: logits (K, 2) of right and wrong at the tag itself, each sequence alone."""
    logits = [
        model(input_ids=torch.tensor([sequence])).logits[0, [i for i, token in enumerate(sequence) if token == TAG]]
        for sequence in SEQUENCES
    ]
    return torch.cat(logits)[:, [RIGHT, WRONG]]


def test_the_reward_is_the_probability_of_the_right_label(model_folder: Path, tolerance: float) -> None:
    plain = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="sdpa")
    model = StepLabels(load_causal_model(model_folder, dtype=torch.float64, attention="sdpa"), (RIGHT, WRONG))
    odds = model(batch())
    assert odds.dtype == torch.float64
    mask = batch().loss_mask
    expected = of_two_labels(plain).softmax(-1)[:, 0]
    assert expected.std() > 1e-3
    torch.testing.assert_close(odds[mask].sigmoid(), expected, rtol=tolerance, atol=1e-12)
    assert not odds[~mask].any()


def test_loss_and_gradients_are_those_of_a_cross_entropy_of_the_two_labels(
    model_folder: Path, tolerance: float
) -> None:
    """The loss that OpenRLHF computes from logits at its placeholder token, restricted to its reward tokens."""
    plain = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="sdpa")
    targets = torch.stack([LABELS, 1 - LABELS], dim=-1)
    expected = cross_entropy(of_two_labels(plain), targets)
    expected.backward()

    trained = load_causal_model(model_folder, dtype=torch.float64, attention="sdpa")
    odds, _, _ = TrainedStepLabels(trained, (RIGHT, WRONG))(batch())
    loss, metrics = step_loss(odds[batch().loss_mask], LABELS, num_steps=4)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    assert metrics["positive_share"].value == 0.5
    gradients = dict(plain.named_parameters())
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=tolerance, atol=tolerance)
