"""No environment: one reply to the row's prompt."""

from __future__ import annotations

from rlhf_core.config.environments.environments import SingleTurn
from rlhf_core.environments.base import Environment, Feedback, Reply


class SingleTurnEnvironment(Environment):
    def __init__(self, config: SingleTurn) -> None:
        pass

    async def step(self, reply: Reply) -> Feedback:
        return Feedback(done=True)
