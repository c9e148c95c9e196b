"""A reward: completions of few characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rlhf_core.config.numbers import Tokens
from rlhf_core.config.rewards.rewards import RewardEntry, TextReward
from rlhf_core.contract import StageContext
from rlhf_core.rewards.base import RewardResult, checked_result


class BrevityConfig(TextReward):
    type: Literal["brevity"]
    limit: Tokens = Field(description="most characters")


class Brevity:
    def __init__(self, limit: int) -> None:
        self._limit = limit

    @classmethod
    def of(cls, config: BrevityConfig, context: StageContext) -> Brevity:
        return cls(config.limit)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardResult:
        return checked_result([float(len(c) <= self._limit) for c in completions], len(completions), "brevity")

    def close(self) -> None: ...


BREVITY = RewardEntry(BrevityConfig, "alignment_example.reward:Brevity")
