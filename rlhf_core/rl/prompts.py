"""Order of the prompts: a pure function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_core.rl.filtering import Group
from rlhf_core.types import Prompt


class PromptSampler:
    """Draws without replacement; each epoch has its own order, and a draw may continue into the next one."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("there are no prompts to sample from")
        self._prompts = prompts
        self._seed = seed
        self._drawn = 0  # the cursor, its only state
        self._epoch = -1
        self._order: list[int] = []

    def draw(self, count: int, step: int) -> list[Prompt]:
        """Return the next prompts, for `step`, counted from 0."""
        return [self.at(self.next()) for _ in range(count)]

    def next(self) -> int:
        """Advance the cursor and return the number of the draw."""
        self._drawn += 1
        return self._drawn - 1

    def of_id(self, prompt_id: str) -> Prompt:
        """Return the prompt with an id. Raises StopIteration if there is none."""
        return next(prompt for prompt in self._prompts if prompt.id == prompt_id)

    def observe(self, groups: Sequence[Group], step: int) -> None:
        """Learn from the rewarded groups of `step`; a no-op for an order that depends on none."""
        return None

    def metrics(self, step: int) -> dict[str, float]:
        """Return metrics of the choice of prompts after `step`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]

    def at(self, number: int) -> Prompt:
        """Return the prompt of a draw, counted from 0."""
        epoch, position = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            # Not a `derived_seed`, so that runs keep the order of earlier versions.
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self._prompts), generator=generator).tolist()
            self._epoch = epoch
        return self._prompts[self._order[position]]
