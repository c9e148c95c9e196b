"""Each merge method against its formula entry by entry, and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_core.errors import StageError
from rlhf_core.models.mixing import linear, slerp, ties

pytestmark = pytest.mark.parts


def random(seed: int, shape: tuple[int, ...] = (5, 4)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FIRST, ONE, TWO = random(0), random(1), random(2)


def test_linear() -> None:
    assert torch.allclose(linear(FIRST, [ONE, TWO], [0.2, 0.3]), 0.5 * FIRST + 0.2 * ONE + 0.3 * TWO)
    assert torch.equal(linear(FIRST, [ONE], [0.0]), FIRST)
    assert torch.allclose(linear(FIRST, [ONE], [1.0]), ONE)


def test_slerp() -> None:
    cosine = (FIRST * ONE).sum() / FIRST.norm() / ONE.norm()
    angle = torch.arccos(cosine)
    found = slerp(FIRST, ONE, 0.3)
    along = torch.sin(0.7 * angle) * FIRST / FIRST.norm() + torch.sin(0.3 * angle) * ONE / ONE.norm()
    assert torch.allclose(found, (0.7 * FIRST.norm() + 0.3 * ONE.norm()) * along / torch.sin(angle))
    for share, end in ((0.0, FIRST), (1.0, ONE)):
        assert torch.allclose(slerp(FIRST, ONE, share), end)


def test_slerp_of_what_has_no_arc() -> None:
    assert torch.allclose(slerp(FIRST, 3 * FIRST, 0.5), 2 * FIRST)
    nothing = torch.zeros_like(FIRST)
    assert torch.allclose(slerp(FIRST, nothing, 0.25), 0.75 * FIRST)
    near = FIRST + 1e-9 * ONE
    assert torch.allclose(slerp(FIRST, near, 0.5), (FIRST + near) / 2)
    with pytest.raises(StageError, match="opposite to each other"):
        slerp(FIRST, -FIRST, 0.5)


def ties_by_hand(first: Tensor, others: list[Tensor], weights: list[float], kept: int, scale: float) -> Tensor:
    changes = []
    for other in others:
        change = (other - first).flatten().tolist()
        largest = sorted(range(len(change)), key=lambda i: -abs(change[i]))[:kept]
        changes.append([value if i in largest else 0.0 for i, value in enumerate(change)])
    result = []
    for i, start in enumerate(first.flatten().tolist()):
        elected = math.copysign(1, sum(w * change[i] for w, change in zip(weights, changes, strict=True)))
        agreeing = [(w, c[i]) for w, c in zip(weights, changes, strict=True) if c[i] * elected > 0]
        mean = sum(w * c for w, c in agreeing) / sum(w for w, _ in agreeing) if agreeing else 0.0
        result.append(start + scale * mean)
    return torch.tensor(result, dtype=torch.float64).view_as(first)


@pytest.mark.parametrize(("density", "kept"), [(1.0, 20), (0.5, 10), (0.21, 5), (0.001, 1)])
def test_ties(density: float, kept: int) -> None:
    others, weights = [ONE, TWO, random(3)], [0.5, 1.0, 2.0]
    found = ties(FIRST, others, weights, density=density, scale=0.7)
    assert torch.allclose(found, ties_by_hand(FIRST, others, weights, kept, 0.7))


def test_ties_of_changes_that_cancel_is_the_first() -> None:
    nothing = torch.zeros_like(ONE)
    assert torch.equal(ties(nothing, [ONE, -ONE], [1.0, 1.0], density=1.0, scale=1.0), nothing)
    assert torch.allclose(ties(FIRST, [ONE], [0.3], density=1.0, scale=1.0), ONE)
    assert torch.equal(ties(FIRST, [FIRST.clone()], [1.0], density=0.2, scale=1.0), FIRST)
