"""Order of the prompts: a pure function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

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

    def draw(self, count: int) -> list[Prompt]:
        return [self.at(self.next()) for _ in range(count)]

    def next(self) -> int:
        """Advance the cursor and return the number of the draw."""
        self._drawn += 1
        return self._drawn - 1

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
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
