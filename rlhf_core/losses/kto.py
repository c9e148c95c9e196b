"""KTO's loss, arXiv:2402.01306."""

from __future__ import annotations

from torch import Tensor


def kto_loss(
    ratios: Tensor, divergence: float, desirable: Tensor, *, beta: float, desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:  # fmt: skip
    """(E,): desirable_weight (1 - sigmoid(beta (r - z))) of a good completion, undesirable_weight
    (1 - sigmoid(beta (z - r))) of a bad one.

    ratios: (E,) float32, r = log p - log p_reference of each completion; divergence: z, at least 0, without gradient;
    desirable: (E,) bool.
    """
    gains = beta * (ratios - divergence)
    good = desirable_weight * (1 - gains.sigmoid())
    bad = undesirable_weight * (1 - (-gains).sigmoid())
    return good.where(desirable, bad)
