"""What a user writes for multi-turn RL: messages in, messages and rewards out. It knows no tokens and no templates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.environments import EnvironmentConfig

Message = Mapping[str, Any]  # role: user, system or tool; content: text; and what else the chat template writes


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an environment says to a reply."""

    messages: Sequence[Message] = ()  # for the policy, before it replies again; read only if the episode continues
    reward: float = 0.0  # of this reply; those of an episode are summed by the reward `environment`
    done: bool = False  # the episode is over


class Environment(ABC):
    """One object per episode. Its methods may raise anything: that ends the run, with the row and the turn."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """config: the settings of `rl.environment`, of the class that the table names."""
        self.config = config

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """What the policy is asked first, for the dataset row `row`."""
        prompt: Sequence[Message] = row["prompt"]
        return prompt

    @abstractmethod
    def step(self, reply: str) -> Feedback:
        """Called for each reply, also for one that was cut at `sampling.max_tokens`, after which the episode ends."""
