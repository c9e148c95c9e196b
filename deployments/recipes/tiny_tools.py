"""The data of the recipe `tiny-tools`: products from reasoning-gym, which a model this small can only get from a tool.

Two annotators wrote the demonstrations. One computes each product with the tool `python`, but is often in a hurry and
leaves the last digit of the result out; the other guesses. Imitation alone cannot detect that both are wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import reasoning_gym

from rlhf_core.environments.tools.python_tool import SCHEMA

Row = dict[str, Any]


def demonstrations(seed: int, size: int, guessed_share: float = 0.5, hasty_share: float = 0.6) -> list[Row]:
    """Return conversations: `guessed_share` of them without a call, `hasty_share` of the others lacking a digit."""
    generator = random.Random(seed)
    rows = []
    for item in _products(seed, size):
        answer = item["answer"]
        messages: list[Row] = [{"role": "user", "content": item["question"]}]
        if generator.random() < guessed_share:
            reply = str(generator.randrange(10 ** (len(answer) - 1), 10 ** len(answer)))
        else:
            code = item["metadata"]["expression"].replace(" ", "")
            call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": answer},
            ]
            reply = answer[:-1] if generator.random() < hasty_share else answer
        rows.append({"messages": [*messages, {"role": "assistant", "content": reply}], "tools": [SCHEMA]})
    return rows


def prompts(seed: int, size: int) -> list[Row]:
    """Return questions with the answer for the verifier."""
    return [{"prompt": item["question"], "answer": item["answer"]} for item in _products(seed, size)]


def _products(seed: int, size: int) -> Iterator[Row]:
    yield from reasoning_gym.create_dataset(
        "products", seed=seed, size=size, min_terms=2, max_terms=2, min_digits=3, max_digits=3
    )
