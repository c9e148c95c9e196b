"""Control of the coefficient of the KL to the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf_core.config.rl.kl import KLConfig

_LARGEST_ERROR = 0.2


class KLController:
    """A fixed coefficient; with a target, the proportional controller of section 2.2 of arXiv:1909.08593."""

    def __init__(self, config: KLConfig) -> None:
        self._target = config.target
        self._horizon = config.horizon
        self.coefficient = config.coefficient

    def update(self, kl: float) -> None:
        """Adapt the coefficient after a step. kl: of the step, in nats per completion.

        error = kl / target - 1, clipped to [-0.2, 0.2]; coefficient *= 1 + error / horizon. The paper's K is
        1 / horizon. OpenRLHF counts its horizon in completions: divide it by the completions of a step.
        """
        if self._target is None or not math.isfinite(kl):  # a skipped update has no KL
            return
        error = min(max(kl / self._target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.coefficient *= 1 + error / self._horizon

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coefficient = state["coefficient"]
