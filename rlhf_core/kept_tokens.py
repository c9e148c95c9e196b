"""The tokens that truncated sampling keeps at each position, over which the policy's probabilities are renormalised."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NO_TOKEN = -1  # fills rows of `dense`


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The kept tokens of T positions, 4 bytes each. A position that was not sampled has none: all tokens count."""

    counts: array[int]  # of each position
    token_ids: array[int]  # of all positions, one after the other

    @classmethod
    def of(cls, positions: Iterable[Sequence[int]]) -> KeptTokens:
        """positions: the tokens that are kept at each."""
        counts, token_ids = array("i"), array("i")
        for kept in positions:
            counts.append(len(kept))
            token_ids.extend(kept)
        return cls(counts, token_ids)

    @classmethod
    def joined(cls, parts: Iterable[KeptTokens]) -> KeptTokens:
        counts, token_ids = array("i"), array("i")
        for part in parts:
            counts.extend(part.counts)
            token_ids.extend(part.token_ids)
        return cls(counts, token_ids)

    @classmethod
    def nowhere(cls, positions: int) -> KeptTokens:
        """Return those of positions that were not sampled."""
        return cls(array("i", bytes(4 * positions)), array("i"))

    def first(self, positions: int) -> KeptTokens:
        """Return those of the first positions."""
        counts = self.counts[:positions]
        return KeptTokens(counts, self.token_ids[: sum(counts)])

    def after(self, positions: int) -> KeptTokens:
        """Return those of the positions after the first ones."""
        return KeptTokens(self.counts[positions:], self.token_ids[sum(self.counts[:positions]) :])

    def dense(self) -> Tensor:
        """Return (T, k) int32 with NO_TOKEN behind the tokens of each position. k: the most of one."""
        return dense(torch.from_numpy(np.asarray(self.counts)), torch.from_numpy(np.asarray(self.token_ids)))


def dense(counts: Tensor, token_ids: Tensor) -> Tensor:
    """Return (T, k) int32, as KeptTokens.dense. counts: (T,), sums to the tokens; token_ids: of all positions."""
    width = int(counts.max()) if counts.numel() else 0
    is_kept = torch.arange(width) < counts.unsqueeze(1)
    return torch.full((len(counts), width), NO_TOKEN, dtype=torch.int32).masked_scatter(is_kept, token_ids.int())
