"""Values and gradients of the divergences against their definitions in float64, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rlhf_core.losses.divergence import forward_kl, jensen_shannon, reverse_kl, top_forward_kl

ROWS, VOCABULARY = 6, 40
Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def logits(seed: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def mixed(p: Tensor, q: Tensor, weight: float) -> Tensor:
    mixture = weight * p + (1 - weight) * q
    return weight * kl(p, mixture) + (1 - weight) * kl(q, mixture)


def top(p: Tensor, q: Tensor, k: int) -> Tensor:
    tokens = p.topk(k).indices
    both = [torch.cat([x.gather(-1, tokens), 1 - x.gather(-1, tokens).sum(-1, keepdim=True)], -1) for x in (p, q)]
    return kl(*both)


def top_of(student: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logprobs, tokens = teacher.topk(k)
    rest = teacher.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return top_forward_kl(student, tokens, torch.cat([logprobs, rest], -1))


CASES: dict[str, tuple[Divergence, Callable[[Tensor, Tensor], Tensor]]] = {
    "forward_kl": (forward_kl, kl),
    "reverse_kl": (reverse_kl, lambda p, q: kl(q, p)),
    "jensen_shannon": (partial(jensen_shannon, weight=0.5), partial(mixed, weight=0.5)),
    "jensen_shannon 0.9": (partial(jensen_shannon, weight=0.9), partial(mixed, weight=0.9)),
    "top 3": (partial(top_of, k=3), partial(top, k=3)),
    "top 39": (partial(top_of, k=VOCABULARY - 1), kl),
    "top 40": (partial(top_of, k=VOCABULARY), kl),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_definition(name: str, dtype: torch.dtype) -> None:
    divergence, definition = CASES[name]
    student, teacher = logits(0).requires_grad_(), logits(1)
    wanted = definition(teacher.softmax(-1), student.softmax(-1))
    (gradient,) = torch.autograd.grad(wanted.sum(), student)
    value, found = divergence(*(x.detach().log_softmax(-1).to(dtype) for x in (student, teacher)))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(value, wanted.detach().to(dtype), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, gradient.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(name: str) -> None:
    same = logits(0).log_softmax(-1).float()
    value, gradient = CASES[name][0](same, same)
    exact = not name.startswith("top")  # whose rest is a rounded sum
    assert value.abs().max() <= (0 if exact else 1e-7)
    assert gradient.abs().max() <= (0 if exact else 1e-7)


@pytest.mark.parametrize(("weight", "limit"), [(1e-6, forward_kl), (1 - 1e-6, reverse_kl)], ids=["0", "1"])
def test_jensen_shannon_goes_to_both_kl(weight: float, limit: Divergence) -> None:
    pair = logits(0, 1.0).log_softmax(-1), logits(1, 1.0).log_softmax(-1)
    for found, wanted in zip(jensen_shannon(*pair, weight=weight), limit(*pair), strict=True):
        torch.testing.assert_close(found / min(weight, 1 - weight), wanted, rtol=1e-4, atol=1e-6)


def test_jensen_shannon_is_bounded_where_the_distributions_are_far_apart() -> None:
    """Log-probs 1000 apart, of which no exponential is finite."""
    student, teacher = (torch.tensor([row]).log_softmax(-1) for row in ([1000.0, 0.0], [0.0, 1000.0]))
    value, gradient = jensen_shannon(student, teacher, weight=0.5)
    assert value.item() == pytest.approx(math.log(2))
    assert gradient.isfinite().all()


def test_fewer_tokens_never_say_more() -> None:
    student, teacher = logits(0).log_softmax(-1), logits(1).log_softmax(-1)
    values = torch.stack([top_of(student, teacher, k)[0] for k in (1, 2, 5, 20, VOCABULARY)])
    assert (values.diff(dim=0) >= -1e-12).all()


def test_the_rest_is_not_lost_to_rounding() -> None:
    """Of a teacher and a student so sure that, in float32, the others' mass is what 1 - p rounds to 0."""
    student, teacher = (torch.tensor([[20.0 + s, 0.0, 1.0]]).double().log_softmax(-1) for s in (0.0, 1.0))
    wanted, _ = top_of(student, teacher, 1)
    found, _ = top_of(student.float(), teacher.float(), 1)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-3)
