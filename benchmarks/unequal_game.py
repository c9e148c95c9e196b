"""The environment of benchmarks/asynchronous.py: most episodes have one turn, some have many."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any


class Unequal:
    def __init__(self, vocabulary: int, seconds: float) -> None:
        """vocabulary: number of words; seconds: mean duration of a turn."""
        self._half, self._seconds = vocabulary // 2, seconds

    def reset(self, row: Mapping[str, Any]) -> Any:
        self._turns = self._left = int(row["answer"])
        return row["prompt"]

    async def step(self, reply: str) -> dict[str, Any]:
        """Reward the share of words from the first half of the vocabulary."""
        self._left -= 1
        await asyncio.sleep(random.expovariate(1 / self._seconds))
        words = [int(word[1:]) for word in reply.split() if word[1:].isdecimal()]
        share = sum(word < self._half for word in words) / max(len(words), 1)
        messages = [{"role": "user", "content": "w9 w8 w7 w6"}]
        return {"messages": messages, "reward": share / self._turns, "done": not self._left}
