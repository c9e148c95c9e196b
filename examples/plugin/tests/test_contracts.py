"""The contracts that alignment ships, on the parts of this plugin."""

from __future__ import annotations

from alignment_example.environment import Guess, GuessConfig
from alignment_example.reward import Brevity
from rlhf_core.environments import EnvironmentHost
from rlhf_core.environments.opening import InProcessHost
from rlhf_core.rewards import Reward
from rlhf_core.testing.environment import EnvironmentContract
from rlhf_core.testing.reward import RewardContract

ROW = {"id": "row", "prompt": [{"role": "user", "content": "a?"}], "answer": "b"}


class TestBrevity(RewardContract):
    samples = (("ab", "p", ROW), ("abcd", "p", ROW), ("", "p", ROW))

    def make(self) -> Reward:
        return Brevity(limit=2)


class TestGuess(EnvironmentContract):
    row = ROW
    replies = (["c", "b"], ["a", "a"])

    def make(self) -> EnvironmentHost:
        return InProcessHost(GuessConfig(type="guess", max_turns=3), Guess)
