"""The episodes that the server has open."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.environments.agents.api.conversations import Conversations, Message
from rlhf_core.environments.agents.program import Policy
from rlhf_core.rollout.tool_calls import ToolCallParser


@dataclass(slots=True)
class Session:
    """One episode."""

    key: str
    policy: Policy
    parser: ToolCallParser | None
    conversations: Conversations
    requests_sample: bool = True  # their temperature and top_p are those of replies
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of replies, for their names
    responses: dict[str, Sequence[Message]] = field(default_factory=dict)  # by name: the conversation up to its reply

    def sampling(self, temperature: float | None, top_p: float | None) -> tuple[float | None, float | None]:
        """Return temperature and top_p of a reply, of which a request has asked for these; None: those of the run."""
        return (temperature, top_p) if self.requests_sample else (None, None)
