"""Counts of the prompts of a run by their fate, compared at its end with its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.training.counts import require_counts


@dataclass
class PromptCounts:
    """Counts of all attempts of a run. Every prompt that is drawn ends in one of them, or is in flight."""

    drawn: int = 0
    collected: int = 0  # for a step
    trained: int = 0
    filtered: int = 0
    surplus: int = 0  # passed filtering, beyond what a step needs
    failed: int = 0  # an episode or a reward, where that is tolerated
    too_old: int = 0  # sampled by weights of too many updates ago
    replayed: int = 0  # trained on once more, in place of a draw
    steps: int = 0
    known: bool = True  # False: resumed from a checkpoint of a release that did not count

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> PromptCounts:
        """Restore the counts in the `state` of a collector."""
        if "counts" in state:
            return cls(**state["counts"])
        print("the checkpoint has no counts: what the run has trained on is not proven", flush=True)
        return cls(known=False)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def proven(self, config: RLConfig, *, cursor: int, in_flight: int | None = None) -> dict[str, float]:
        """Return the counts as metrics. cursor: of the prompts; in_flight: those that no step has taken; None: steps
        take all that they draw.

        Raises StageError unless each step was trained on as many prompts as it needs, and no prompt was lost.
        """
        if not self.known:
            return {}
        ended = self.collected + self.filtered + self.surplus + self.failed + self.too_old + (in_flight or 0)
        wanted = config.steps * config.prompts_per_step - self.replayed
        filtering = config.settings.filtering
        if filtering is not None and filtering.when_short == "train":
            wanted = min(wanted, self.collected)
        if filtering is None and in_flight is None:
            wanted -= self.failed  # nothing replaces them
        require_counts({
            "steps": (config.steps, self.steps), "prompts trained": (wanted + self.replayed, self.trained),
            "prompts collected": (wanted, self.collected), "prompts drawn": (cursor, self.drawn),
            "prompts that were drawn and trained on, dropped or left": (self.drawn, ended),
        })  # fmt: skip
        names = ["drawn", "trained", "filtered", "surplus", "failed", "too_old"]
        names += [] if config.replay is None else ["replayed"]
        return {"steps": float(self.steps), **{f"prompts_{name}": float(getattr(self, name)) for name in names}}
