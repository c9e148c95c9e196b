"""An environment: the policy guesses a letter, and is told on which side of it to look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rlhf_core.config.environments.environments import EnvironmentConfig, EnvironmentEntry
from rlhf_core.environments.base import Environment, Feedback, Reply


class GuessConfig(EnvironmentConfig):
    type: Literal["guess"]
    price: float = Field(default=0.25, description="subtracted for a wrong guess")

    @property
    def row_columns(self) -> tuple[str, ...]:
        return ("answer",)


class Guess(Environment):
    def __init__(self, config: GuessConfig) -> None:
        self._price = config.price
        self._letter = ""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._letter = row["answer"]
        return await super().reset(row, seed)

    async def step(self, reply: Reply) -> Feedback:
        if reply.text == self._letter:
            return Feedback(reward=1.0, done=True)
        hint = "up" if reply.text < self._letter else "down"
        return Feedback([{"role": "user", "content": hint}], reward=-self._price, metrics={"wrong_guesses": 1})


GUESS = EnvironmentEntry(GuessConfig, "alignment_example.environment:Guess")
