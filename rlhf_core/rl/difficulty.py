"""Draws of prompts by their pass rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.rl.difficulty import Bounds, SelectConfig
from rlhf_core.errors import StageError
from rlhf_core.rl.filtering import Group
from rlhf_core.rl.pass_rates import PassRates, prompt_identity
from rlhf_core.rl.prompts import PromptSampler
from rlhf_core.types import Prompt


class SelectedPrompts(PromptSampler):
    """A PromptSampler that passes over prompts whose known pass rate is outside of the step's bounds.

    Draws are a pure function of (seed, earlier scores): a resumed run continues with the same prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, config: SelectConfig, rates: PassRates) -> None:
        """Raises StageError if earlier artifacts have rates, and none of these `prompts`."""
        super().__init__(prompts, seed)
        self._config = config
        self._rates = rates
        self._identities = {prompt.id: prompt_identity(prompt.row) for prompt in prompts}
        self._passed = 0  # positions in the order of the epochs that were drawn or passed over
        self._outside = 0  # prompts drawn from outside of the bounds since the last metrics
        if len(rates) and not any(rates.get(identity) for identity in self._identities.values()):
            raise StageError(
                "select.rates: no prompt of the dataset has a pass rate there: name results of its prompts"
            )

    def draw(self, count: int, step: int) -> list[Prompt]:
        """See PromptSampler. Raises StageError if no prompt is within the bounds and `when_none` is stop."""
        return [self._next(step) for _ in range(count)]

    def _next(self, step: int) -> Prompt:
        self._drawn += 1
        bounds = self._config.bounds(step)
        chosen, nearest = self._passed, math.inf
        # The rest of an epoch and the whole next one: every prompt is looked at.
        for position in range(self._passed, self._passed + 2 * len(self._prompts)):
            distance = self._distance(self.at(position), bounds, step)
            if distance < nearest:
                chosen, nearest = position, distance
            if not distance:
                break
        if nearest and self._config.when_none == "stop":
            raise StageError(
                f"step {step}: no prompt has a pass rate from {bounds[0]:g} to {bounds[1]:g}: widen select.pass_rate, "
                "let rates be forgotten (`forget_after`), or set `when_none: nearest`"
            )
        self._outside += nearest > 0
        self._passed = chosen + 1
        return self.at(chosen)

    def _distance(self, prompt: Prompt, bounds: Bounds, step: int) -> float:
        """Return how far the prompt's rate is from the bounds; 0 if it is within them or unknown."""
        rate = self._rate(prompt, step)
        return 0.0 if rate is None else max(bounds[0] - rate, rate - bounds[1], 0.0)

    def _rate(self, prompt: Prompt, step: int) -> float | None:
        known, lasts = self._rates.get(self._identities[prompt.id]), self._config.forget_after
        return None if known is None or (lasts is not None and step - known.step >= lasts) else known.rate

    def observe(self, groups: Sequence[Group], step: int) -> None:
        """Keep the pass rates of rewarded groups. Raises StageError for a completion without a score."""
        for group in groups:
            scores = [trajectory.score for trajectory in group if trajectory.score is not None]
            if len(scores) < len(group):
                raise StageError("select: the reward gave a completion no score from 0 to 1, which the pass rate needs")
            self._rates.observe(self._identities[group[0].prompt.id], scores, step + 1)

    def metrics(self, step: int) -> dict[str, float]:
        """Return shares of the prompts with a known rate, and the bounds that chose from them."""
        low, high = self._config.bounds(step)
        rates = [rate for prompt in self._prompts if (rate := self._rate(prompt, step + 1)) is not None]
        outside, self._outside = self._outside, 0
        metrics = {
            "difficulty/known_share": len(rates) / len(self._prompts), "difficulty/lowest": low,
            "difficulty/highest": high, "difficulty/outside": float(outside),
        }  # fmt: skip
        if rates:
            solved, hopeless = (sum(rate == end for rate in rates) / len(rates) for end in (1.0, 0.0))
            metrics |= {
                "difficulty/solved_share": solved, "difficulty/mixed_share": 1 - solved - hopeless,
                "difficulty/hopeless_share": hopeless,
            }  # fmt: skip
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "passed": self._passed, "rates": self._rates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._passed = state["passed"]
        self._rates.load_state_dict(state["rates"])
