"""Dr. GRPO: arXiv:2503.20783."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf_core.algorithms.grpo import GRPO


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """Advantage: reward minus the mean of its group, no deviation. Loss: clipped, sums over completions divided by a
    constant, so that neither easy groups nor short completions count more. Models: policy.

    OpenRLHF keeps the mean over tokens (aggregation: token).
    """

    divide_by_std: ClassVar[bool] = False
