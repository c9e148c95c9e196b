from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_core.losses.kl import KLEstimator, estimate, loss_term

KINDS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")


def test_estimates_worked_by_hand() -> None:
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert estimate(logprobs, reference, "k1").tolist() == [0.5, -1.0]
    assert estimate(logprobs, reference, "k2").tolist() == [0.125, 0.5]
    expected = [math.exp(-0.5) - 1 + 0.5, math.e - 2]
    assert estimate(logprobs, reference, "k3").tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.isfinite(estimate(torch.tensor([-500.0]), torch.tensor([0.0]), "k3")).all()


def _distributions() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(5, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: KLEstimator) -> None:
    logits, reference = _distributions()
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    expectation = (policy.exp() * estimate(policy, reference, kind)).sum()
    assert expectation.item() == pytest.approx(exact.item(), abs=1e-12)


def _expected_gradient(kind: KLEstimator) -> tuple[Tensor, Tensor, Tensor]:
    """The expectation of the loss term's gradient over tokens that the policy samples; KL(p || q)'s; KL(q || p)'s."""
    logits, reference = _distributions()
    expected = torch.zeros(5, dtype=torch.float64)
    probabilities = logits.detach().softmax(0)
    for token in range(5):
        logprob = logits.log_softmax(0)[token : token + 1]
        term = loss_term(logprob, reference[token : token + 1], torch.tensor([True]), torch.ones(1), kind)
        (gradient,) = torch.autograd.grad(term, logits)
        expected += probabilities[token] * gradient
    policy = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits)
    return expected, reverse, forward


@pytest.mark.parametrize("kind", ["k1", "k2"])
def test_k1_and_k2_as_loss_descend_the_kl_of_policy_to_reference(kind: KLEstimator) -> None:
    expected, reverse, _ = _expected_gradient(kind)
    assert torch.allclose(expected, reverse, atol=1e-12)


def test_k3_as_loss_descends_the_other_direction() -> None:
    expected, _, forward = _expected_gradient("k3")
    assert torch.allclose(expected, forward, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_term_is_the_weighted_sum_of_the_estimator_over_trained_tokens(kind: KLEstimator) -> None:
    logprobs, reference = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.0, float("-inf")])
    mask = torch.tensor([True, True, False])
    expected = estimate(logprobs[:2], reference[:2], kind).sum() / 4
    weights = torch.tensor([0.25, 0.25, float("nan")])
    assert loss_term(logprobs, reference, mask, weights, kind).item() == pytest.approx(expected.item(), abs=1e-7)
