"""An environment that rejects each wrong reply, until one is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.environments.environments import Retry
from rlhf_core.config.rewards.rewards import VerifierReward
from rlhf_core.environments.base import Environment, Feedback, Message, Reply
from rlhf_core.rewards.verifier import Verifier


class RetryEnvironment(Environment):
    def __init__(self, config: Retry) -> None:
        self._verifier = Verifier(VerifierReward(type="verifier", pattern=config.pattern))
        self._feedback = config.feedback
        self._row: Mapping[str, Any] = {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self._row = row
        prompt: Sequence[Message] = row["prompt"]
        return prompt

    async def step(self, reply: Reply) -> Feedback:
        (right,) = self._verifier([reply.text], [""], [self._row]).rewards
        if right:
            return Feedback(reward=1.0, done=True)
        return Feedback([{"role": "user", "content": self._feedback}])
