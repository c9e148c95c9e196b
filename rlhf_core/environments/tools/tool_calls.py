"""Execution of a reply's tool calls, and the messages with their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.environments.tools import CallsTools
from rlhf_core.environments.base import Feedback
from rlhf_core.environments.tools.toolset import EpisodeTools, ToolResult
from rlhf_core.rollout.tool_calls import ToolCall

_UNREADABLE = "Error: this call cannot be read"


class ToolCalls:
    """The tool calls of one episode, run one after the other in their order."""

    def __init__(self, config: CallsTools, tools: Mapping[str, EpisodeTools]) -> None:
        """tools: the runner of each tool, by the tool's name."""
        self._config, self._tools = config, tools
        self._malformed = 0

    def unreadable(self) -> Feedback:
        """Return the feedback on a reply whose calls cannot be parsed."""
        self._malformed += 1
        return Feedback(
            [{"role": "tool", "content": _UNREADABLE}],
            done=self._malformed == self._config.max_malformed_replies,
            metrics={"malformed_replies": 1},
        )

    async def results(self, calls: Sequence[ToolCall]) -> Feedback:
        """Return a message for each call. Without calls the episode ends. Raises EpisodeError if a tool does."""
        counts: Counter[str] = Counter()
        messages = [await self._result(call, counts) for call in calls]
        return Feedback(messages, done=not calls, metrics=dict(counts))

    async def _result(self, call: ToolCall, counts: Counter[str]) -> Mapping[str, Any]:
        counts["tool_calls"] += 1
        if (tools := self._tools.get(call.name)) is None:
            counts["unknown_tools"] += 1
            result = ToolResult(f"Error: there is no tool {call.name[:100]!r}; there are {', '.join(self._tools)}")
        else:
            result = await tools.call(call.name, call.arguments)
        if result.problem is not None:
            counts[result.problem] += 1
        text, most = result.text, self._config.max_result_characters
        if len(text) > most:
            text = f"{text[:most]}\n[cut: {len(text)} characters]"
        return {"role": "tool", "name": call.name, "content": text}
