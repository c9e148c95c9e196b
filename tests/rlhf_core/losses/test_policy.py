from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.losses.policy import (
    cispo_policy_loss,
    clipped_policy_loss,
    divergence_masked_policy_loss,
    geometric_mean_policy_loss,
    sequence_policy_loss,
    soft_gated_policy_loss,
)
from rlhf_core.metrics import LossAndMetrics

# Ratios 1.5, 1.5, 0.5, 0.5 with advantages 2, -2, 2, -2, and one token that is not trained.
RATIOS = torch.tensor([1.5, 1.5, 0.5, 0.5, 3.0])
ADVANTAGES = torch.tensor([2.0, -2.0, 2.0, -2.0, 100.0])
MASK = torch.tensor([True, True, True, True, False])
WEIGHTS = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.25])
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def _gradient(loss: Tensor, logprobs: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return gradient.tolist()


def test_clipped_worked_by_hand() -> None:
    logprobs = RATIOS.log().requires_grad_()
    loss, metrics = clipped_policy_loss(logprobs, torch.zeros(5), ADVANTAGES, MASK, WEIGHTS, **CLIP)
    # Kept: 1.3 * 2 (clipped), 1.5 * -2, 0.5 * 2, 0.8 * -2 (clipped)
    assert loss.item() == pytest.approx(-(2.6 - 3.0 + 1.0 - 1.6) / 4)
    assert metrics["clip_fraction"].value.item() == 2
    expected_kl = 2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))
    assert metrics["approx_kl"].value.item() == pytest.approx(expected_kl, abs=1e-6)
    # d/dlogp = -ratio * advantage / 4 where the clip is not active, else none.
    assert _gradient(loss, logprobs) == pytest.approx([0.0, 0.75, -0.25, 0.0, 0.0])


def test_dual_clip_bounds_what_a_negative_advantage_costs() -> None:
    ratios = torch.tensor([5.0, 2.0, 5.0])
    logprobs = ratios.log().requires_grad_()
    advantages, everything = torch.tensor([-2.0, -2.0, 2.0]), torch.ones(3, dtype=torch.bool)
    loss, metrics = clipped_policy_loss(
        logprobs, torch.zeros(3), advantages, everything, torch.ones(3), **CLIP, dual_clip=3.0
    )
    # 5 * 2 is bounded by 3 * 2; 2 * 2 is not; the positive one is clipped at 1.3 as ever.
    assert loss.item() == pytest.approx(6.0 + 4.0 - 2.6)
    assert metrics["clip_fraction"].value.item() == 2
    assert _gradient(loss, logprobs) == pytest.approx([0.0, 4.0, 0.0])


def test_sequence_ratio_worked_by_hand() -> None:
    # Two sequences, of 3 tokens (2 trained) and 2. Log-ratios .1, .3: ratio e^.2, gradient e^.2 / 2 at each token.
    # Log-ratios .6, .2: ratio e^.4 > 1.3: clipped.
    lengths, mask = torch.tensor([3, 2]), torch.tensor([False, True, True, True, True])
    logprobs = torch.tensor([9.0, 0.1, 0.3, 0.6, 0.2], requires_grad=True)
    advantages = torch.tensor([9.0, 2.0, 2.0, 3.0, 3.0])
    weights = torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25])  # by sequence: 1 / (2 * 2)
    loss, metrics = sequence_policy_loss(logprobs, torch.zeros(5), advantages, mask, weights, lengths, **CLIP)
    assert loss.item() == pytest.approx(-(math.exp(0.2) * 2 + 1.3 * 3) / 2)
    assert metrics["clip_fraction"].value.item() == 2
    at_each = -math.exp(0.2) * 2 / 2 / 2
    assert _gradient(loss, logprobs) == pytest.approx([0.0, at_each, at_each, 0.0, 0.0])


def test_sequence_dual_clip() -> None:
    logprobs = torch.tensor([1.0, 2.0], requires_grad=True)
    loss, _ = sequence_policy_loss(
        logprobs, torch.zeros(2), torch.tensor([-1.0, -1.0]), torch.tensor([True, True]), torch.tensor([0.5, 0.5]),
        torch.tensor([2]), **CLIP, dual_clip=2.0,
    )  # fmt: skip
    assert loss.item() == pytest.approx(2.0)  # not e^1.5
    assert _gradient(loss, logprobs) == [0.0, 0.0]


def test_cispo_worked_by_hand() -> None:
    logprobs = RATIOS.log().requires_grad_()
    loss, metrics = cispo_policy_loss(logprobs, torch.zeros(5), ADVANTAGES, MASK, WEIGHTS, **CLIP)
    expected = 1.3 * math.log(1.5) * (2 - 2) + 0.8 * math.log(0.5) * (2 - 2)
    assert loss.item() == pytest.approx(-expected / 4, abs=1e-6)
    assert metrics["clip_fraction"].value.item() == 4
    # No token loses its gradient: -weight * advantage / 4.
    assert _gradient(loss, logprobs) == pytest.approx([-0.65, 0.65, -0.4, 0.4, 0.0])


Function = Callable[..., LossAndMetrics]


def _run(function: Function, values: Tensor, *rest: Tensor, lengths: Tensor) -> LossAndMetrics:
    extra = (lengths,) if function in (sequence_policy_loss, geometric_mean_policy_loss) else ()
    own = {
        soft_gated_policy_loss: {"temperature_positive": 1.0, "temperature_negative": 1.05},
        divergence_masked_policy_loss: {**CLIP, "max_ratio": 20.0},
    }
    return function(values, *rest, *extra, **own.get(function, CLIP))


FIRST = [clipped_policy_loss, sequence_policy_loss, cispo_policy_loss]
# The others have oracles of their own in tests/rlhf_core/algorithms.
OTHERS = [geometric_mean_policy_loss, soft_gated_policy_loss, divergence_masked_policy_loss]
ALL = pytest.mark.parametrize("function", [*FIRST, *OTHERS])


@ALL
def test_no_overflow_and_no_trained_token(function: Function) -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    mask, lengths = torch.tensor([True, True]), torch.tensor([1, 1])
    old, minus, ones = torch.tensor([-200.0, 200.0]), torch.tensor([-1.0, -1.0]), torch.ones(2)
    loss, metrics = _run(function, logprobs, old, minus, mask, ones, lengths=lengths)
    assert all(torch.isfinite(value) for value in (loss, *(metric.value for metric in metrics.values())))
    assert all(map(math.isfinite, _gradient(loss, logprobs)))
    empty, _ = _run(function, logprobs, torch.zeros(2), ones, ~mask, ones, lengths=lengths)
    assert empty.item() == 0.0
    assert _gradient(empty, logprobs) == [0.0, 0.0]


@ALL
def test_what_is_not_trained_is_not_read(function: Function) -> None:
    logprobs = torch.tensor([0.1, float("nan")], requires_grad=True)
    poison = torch.tensor([1.0, float("inf")])
    loss, metrics = _run(
        function, logprobs, torch.zeros(2), poison, torch.tensor([True, False]), poison, lengths=torch.tensor([2])
    )
    assert all(torch.isfinite(value) for value in (loss, *(metric.value for metric in metrics.values())))
    assert _gradient(loss, logprobs)[1] == 0.0


def _plain(
    function: Function, logprobs: list[list[float]], old: list[list[float]], advantages: list[float], weight: float
) -> float:
    """The three losses in plain Python, sequence by sequence; every token is trained, one advantage a sequence."""
    total = 0.0
    for now, before, advantage in zip(logprobs, old, advantages, strict=True):
        mean = sum(a - b for a, b in zip(now, before, strict=True)) / len(now)
        for a, b in zip(now, before, strict=True):
            ratio = math.exp(mean if function is sequence_policy_loss else a - b)
            held = min(max(ratio, 0.8), 1.3)
            if function is cispo_policy_loss:
                total -= weight * held * advantage * a
            else:
                total -= weight * min(ratio * advantage, held * advantage)
    return total


finite = st.floats(-3, 3, width=32)
pairs = st.lists(st.tuples(finite, finite), min_size=1, max_size=4)


@pytest.mark.parametrize("function", FIRST)
@settings(max_examples=40, deadline=None)
@given(sequences=st.lists(st.tuples(pairs, finite), min_size=1, max_size=4))
def test_equals_an_independent_implementation_whole_or_in_parts(
    function: Function, sequences: list[tuple[list[tuple[float, float]], float]]
) -> None:
    now = [[a for a, _ in tokens] for tokens, _ in sequences]
    before = [[b for _, b in tokens] for tokens, _ in sequences]
    advantages = [advantage for _, advantage in sequences]
    expected = _plain(function, now, before, advantages, weight=0.125)

    def ours(chosen: slice) -> float:
        lengths = torch.tensor([len(tokens) for tokens in now[chosen]])
        flat = torch.tensor([a for tokens in now[chosen] for a in tokens], dtype=torch.float64)
        old = torch.tensor([b for tokens in before[chosen] for b in tokens], dtype=torch.float64)
        spread = torch.tensor(advantages[chosen], dtype=torch.float64).repeat_interleave(lengths)
        weights = torch.full_like(flat, 0.125)
        return _run(function, flat, old, spread, torch.ones_like(flat).bool(), weights, lengths=lengths)[0].item()

    assert ours(slice(None)) == pytest.approx(expected, abs=1e-9)
    parts = sum(ours(slice(i, i + 1)) for i in range(len(now)))
    assert parts == pytest.approx(expected, abs=1e-9)
