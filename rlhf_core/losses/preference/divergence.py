"""Implicit rewards of an f-divergence between policy and reference, arXiv:2309.16240: beta f'(u), u = exp(r).

Constants are left out: they cancel in the difference of two rewards. The reverse KL, f = u log u, is DPO's.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.config.stages.preference_losses import DivergenceLoss
from rlhf_core.losses.preference.base import PairLogprobs, RatioLoss

D = TypeVar("D", bound=DivergenceLoss)
_LARGEST_EXPONENT = 60.0  # exp of more, squared, is infinite in float32


class DifferenceLoss(RatioLoss[D]):
    """Base of losses of the difference of the two rewards."""

    def rewards(self, pairs: PairLogprobs) -> Tensor:
        ratios = self.ratios(pairs)
        match self.config.divergence:
            case "reverse_kl":
                values = ratios
            case "forward_kl":
                values = -_exp(-ratios)
            case "js":
                values = logsigmoid(ratios)  # log(u / (1 + u))
            case "alpha":
                assert self.config.alpha is not None
                values = -_exp(-self.config.alpha * ratios) / self.config.alpha
        return self.config.beta * values

    def difference(self, pairs: PairLogprobs) -> Tensor:
        """Return d, the chosen reward minus the rejected one, (P,)."""
        rewards = self.rewards(pairs)
        return rewards[:, 0] - rewards[:, 1]


def _exp(exponents: Tensor) -> Tensor:
    """Return exp without overflow: constant beyond the largest exponent."""
    return exponents.clamp(max=_LARGEST_EXPONENT).exp()
