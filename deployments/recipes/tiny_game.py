"""The game of the recipe `tiny-game`, and games of a person who does not always heed the hints.

The player guesses a number from 1 to a limit, and receives `higher` or `lower`.
"""

from __future__ import annotations

import random
from typing import Any

Row = dict[str, Any]

FEWEST, MOST = 8, 24  # the smallest and the largest limit
_HELD_OUT = (10, 14, 18, 22)  # limits that only evaluation has


class Guess:
    """The environment. A game ends with the number, or after as many guesses as the recipe's `max_turns`.

    The number earns 1, and each guess that the hints exclude costs `price`.
    """

    def __init__(self, price: float) -> None:
        self.price = price

    def reset(self, row: Row) -> list[Row]:
        self.number = int(row["answer"])
        self.left = range(1, int(row["prompt"][0]["content"].rpartition(" ")[2][:-1]) + 1)
        return list(row["prompt"])

    def step(self, reply: str) -> Row:
        guess = int(reply) if reply.isdecimal() else 0
        if guess == self.number:
            return {"reward": 1.0, "done": True}
        reward = 0.0 if guess in self.left else -self.price
        if guess < self.number:
            self.left = range(max(self.left.start, guess + 1), self.left.stop)
        else:
            self.left = range(self.left.start, min(self.left.stop, guess))
        return {"reward": reward, "messages": [_user(_heard(guess, self.number))]}


def games(seed: int, size: int, max_turns: int = 4, careless_share: float = 0.4) -> list[Row]:
    """Return games of a person who guesses any remaining number, and in `careless_share` of all turns any number."""
    generator = random.Random(seed)
    return [{"messages": _game(generator, max_turns, careless_share)} for _ in range(size)]


def numbers(held_out: bool) -> list[Row]:
    """Return every number of every limit."""
    limits = [limit for limit in range(FEWEST, MOST + 1) if (limit in _HELD_OUT) == held_out]
    return [
        {"prompt": [_user(_question(limit))], "answer": str(number)}
        for limit in limits
        for number in range(1, limit + 1)
    ]


def _game(generator: random.Random, max_turns: int, careless_share: float) -> list[Row]:
    limit = generator.choice([limit for limit in range(FEWEST, MOST + 1) if limit not in _HELD_OUT])
    number, lowest, highest = generator.randint(1, limit), 1, limit
    messages = [_user(_question(limit))]
    for _ in range(max_turns):
        careless = generator.random() < careless_share
        guess = generator.randint(1, limit) if careless else generator.randint(lowest, highest)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            return messages
        lowest = max(lowest, guess + 1) if guess < number else lowest
        highest = min(highest, guess - 1) if guess > number else highest
        messages.append(_user(_heard(guess, number)))
    return messages[:-1]


def _heard(guess: int, number: int) -> str:
    return "higher" if guess < number else "lower"


def _question(limit: int) -> str:
    return f"Guess my number from 1 to {limit}."


def _user(content: str) -> Row:
    return {"role": "user", "content": content}
