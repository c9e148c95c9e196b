"""No environment: one reply to the row's prompt."""

from __future__ import annotations

from rlhf_core.environments.base import Environment, Feedback


class SingleTurnEnvironment(Environment):
    def step(self, reply: str) -> Feedback:
        return Feedback(done=True)
