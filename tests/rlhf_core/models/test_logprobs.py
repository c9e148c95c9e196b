"""Chunks change nothing: values to 1e-6 and gradients, against plain log-softmax."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.models.logprobs import TargetLogprobs, chunked_logprobs

pytestmark = pytest.mark.parts

VOCABULARY = 17


def plain(head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    each = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    logprobs = torch.log_softmax(head(hidden).float() / each, dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_elements", [1, VOCABULARY * 4, VOCABULARY * 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.3, 1.9, 11)], ids=["1", "0.7", "of each row"])
def test_values_and_gradients_equal_plain_ones(chunk_elements: int, temperature: float | Tensor) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, VOCABULARY, bias=False)
    hidden = torch.randn(11, 8, requires_grad=True)
    targets = torch.randint(VOCABULARY, (11,))
    weights = torch.randn(2, 11)

    def gradients(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), [hidden, head.weight])

    expected = plain(head, hidden, targets, temperature)
    logprobs, entropy = chunked_logprobs(
        head, hidden, targets, vocabulary=VOCABULARY, temperature=temperature, with_entropy=True,
        chunk_elements=chunk_elements,
    )  # fmt: skip
    assert entropy is not None
    torch.testing.assert_close(logprobs, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-6, atol=1e-6)
    for got, wanted in zip(gradients(logprobs, entropy), gradients(*expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("what", ["logprobs", "entropy"])
def test_values_and_gradients_are_those_of_float64(what: str, offset: float) -> None:
    """At a temperature, with 2000 words, and with logits so large that their own rounding is 3e-5."""
    torch.manual_seed(0)
    vocabulary, temperature = 2000, 0.7
    head = nn.Linear(8, vocabulary)
    with torch.no_grad():
        head.bias.copy_(torch.full((vocabulary,), offset) + torch.randint(-3, 3, (vocabulary,)))
        head.weight.copy_(torch.randint(-8, 8, head.weight.shape) / 8)  # logits that float32 holds exactly
    hidden, targets = torch.randint(-8, 8, (9, 8)) / 8, torch.randint(vocabulary, (9,))
    exact_head, exact_hidden = copy.deepcopy(head).double(), hidden.double().requires_grad_()
    hidden.requires_grad_()
    wanted = torch.log_softmax(exact_head(exact_hidden) / temperature, dim=-1)
    expected = {
        "logprobs": wanted.gather(-1, targets[:, None])[:, 0], "entropy": -(wanted.exp() * wanted).sum(-1),
    }[what]  # fmt: skip
    logprobs, entropy = chunked_logprobs(
        head, hidden, targets, vocabulary=vocabulary, temperature=temperature, with_entropy=True,
        chunk_elements=4 * vocabulary,
    )  # fmt: skip
    assert entropy is not None
    got = {"logprobs": logprobs, "entropy": entropy}[what]
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6 if offset == 0 else 5e-5)
    weights = torch.linspace(-1, 1, 9)
    gradients = torch.autograd.grad((weights * got).sum(), [hidden, head.weight, head.bias])
    wanted_gradients = torch.autograd.grad(
        (weights.double() * expected).sum(), [exact_hidden, exact_head.weight, exact_head.bias]
    )
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        tolerance = (5e-6 if offset == 0 else 1e-4) * float(wanted_gradient.abs().max())
        torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_finite_differences(temperature: float, with_entropy: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3])

    def results(logits: Tensor) -> tuple[Tensor, ...]:
        return TargetLogprobs.apply(logits, targets, temperature, with_entropy)[: 1 + with_entropy]

    assert torch.autograd.gradcheck(results, logits)
    if with_entropy:  # each alone: the other has no gradient
        assert torch.autograd.gradcheck(lambda x: results(x)[0], logits)
        assert torch.autograd.gradcheck(lambda x: results(x)[1], logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_one_function_gives_what_autograd_gives(dtype: torch.dtype, with_entropy: bool) -> None:
    """The values to the bit; the logits stay as they are, and a second backward gives the same gradient."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(6, 50)).to(dtype).requires_grad_()
    before, targets, weights = logits.detach().clone(), torch.randint(50, (6,)), torch.randn(2, 6)
    distribution = torch.log_softmax(logits.float() / 0.7, dim=-1)
    expected = [distribution.gather(-1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)]
    found = TargetLogprobs.apply(logits, targets, 0.7, with_entropy)[: 1 + with_entropy]
    assert all(ours.equal(theirs) for ours, theirs in zip(found, expected[: 1 + with_entropy], strict=True))
    assert logits.equal(before)

    def gradient(results: Sequence[Tensor]) -> Tensor:
        total = torch.stack([w @ r for w, r in zip(weights, results, strict=False)]).sum()
        return torch.autograd.grad(total, logits, retain_graph=True)[0]

    once = gradient(found)
    assert once.dtype == dtype
    torch.testing.assert_close(once, gradient(expected[: 1 + with_entropy]))
    assert gradient(found).equal(once)


def test_a_worked_example() -> None:
    head = nn.Linear(1, 2, bias=False)
    nn.init.constant_(head.weight, 0.0)
    head.weight.data[1] = math.log(3.0)
    logprobs, entropy = chunked_logprobs(
        head, torch.ones(2, 1), torch.tensor([0, 1]), vocabulary=2, temperature=1.0, with_entropy=True
    )
    assert logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.75)], abs=1e-6)
    assert entropy is not None
    assert entropy.tolist() == pytest.approx([-0.25 * math.log(0.25) - 0.75 * math.log(0.75)] * 2, abs=1e-6)
    half, _ = chunked_logprobs(head, torch.ones(1, 1), torch.tensor([1]), vocabulary=2, temperature=2.0)
    assert half.item() == pytest.approx(math.log(math.sqrt(3) / (1 + math.sqrt(3))), abs=1e-6)


def test_no_rows_give_no_values_but_a_gradient_of_zero() -> None:
    head = nn.Linear(4, VOCABULARY, bias=False)
    logprobs, _ = chunked_logprobs(head, torch.empty(0, 4), torch.empty(0, dtype=torch.int64), vocabulary=VOCABULARY)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert torch.equal(head.weight.grad, torch.zeros(VOCABULARY, 4))


def test_bfloat16_weights_get_float32_mathematics() -> None:
    head = nn.Linear(8, VOCABULARY, bias=False, dtype=torch.bfloat16)
    logprobs, entropy = chunked_logprobs(
        head, torch.randn(3, 8, dtype=torch.bfloat16), torch.tensor([0, 1, 2]), vocabulary=VOCABULARY, with_entropy=True
    )
    assert entropy is not None
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_logits_of_four_chunks_are_alive_together_at_most() -> None:
    """What autograd keeps grows with the chunk, not with the batch."""
    head = nn.Linear(8, VOCABULARY, bias=False)
    hidden, targets = torch.randn(64, 8, requires_grad=True), torch.zeros(64, dtype=torch.int64)
    kept: list[int] = []

    def remember(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        chunked_logprobs(head, hidden, targets, vocabulary=VOCABULARY, chunk_elements=VOCABULARY * 4)
    assert kept.count(VOCABULARY * 4) == 4
    assert max(kept) <= hidden.numel()
