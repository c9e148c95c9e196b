"""DAPO: arXiv:2503.14476."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.algorithms.grpo import GRPO


@dataclass(frozen=True)
class DAPO(GRPO):
    """Advantage: GRPO's. Loss: clipped with a higher upper bound, a mean over tokens, no KL. Models: policy.

    The paper's other half happens before: dynamic sampling (`filtering`) and the overlong penalty (`shaping`).
    """
