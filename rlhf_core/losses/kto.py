"""KTO's loss, arXiv:2402.01306."""

from __future__ import annotations

from torch import Tensor


def kto_loss(
    ratios: Tensor, divergence: float, desirable: Tensor, *, beta: float, desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:  # fmt: skip
    """Return the loss of each completion, (E,): desirable_weight (1 - sigmoid(beta (r - z))) if it is desirable, else
    undesirable_weight (1 - sigmoid(beta (z - r))).

    ratios: (E,) float32, r = log p - log p_reference of each completion; divergence: z, at least 0, without gradient;
    desirable: (E,) bool.
    """
    gains = beta * (ratios - divergence)
    good = desirable_weight * (1 - gains.sigmoid())
    bad = undesirable_weight * (1 - (-gains).sigmoid())
    return good.where(desirable, bad)
