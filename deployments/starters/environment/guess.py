"""The environment of this run: change it as you like; the stages that use it are then computed again."""

from __future__ import annotations

import re
from typing import Any


class Guess:
    """One object per episode. The number earns 1, and each wrong guess costs `price`."""

    def __init__(self, price: float) -> None:
        self.price = price

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.number = int(row["answer"])
        messages: list[dict[str, str]] = row["prompt"]
        return messages

    def step(self, reply: str) -> dict[str, Any]:
        match = re.search(r"\d+", reply)
        guess = int(match[0]) if match else None
        if guess == self.number:
            return {"reward": 1.0, "done": True}
        hint = "Reply with a number." if guess is None else "Higher." if guess < self.number else "Lower."
        return {"messages": [{"role": "user", "content": hint}], "reward": -self.price}
