"""An episode as a response of OpenAI's Responses API, the format that resource servers of NeMo Gym verify."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.rollout.tool_calls import ToolCall

_REASONING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class ResponseItems:
    """The policy's texts, reasoning and calls, in order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def add_reply(self, text: str, calls: Sequence[ToolCall] = ()) -> None:
        """Add a reply. text: beside the calls; text between <think> and </think> becomes an item of its own."""
        content = _REASONING.sub("", text).strip()
        if reasoning := [{"type": "summary_text", "text": thought} for thought in _REASONING.findall(text)]:
            self._add("rs", type="reasoning", summary=reasoning)
        if content or not calls:
            part = {"type": "output_text", "text": content, "annotations": []}
            self._add("msg", type="message", role="assistant", status="completed", content=[part])
        for call in calls:
            identity = f"call_{len(self.items)}"
            arguments = json.dumps(call.arguments)
            self._add("fc", type="function_call", call_id=identity, name=call.name, arguments=arguments)

    def add_results(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add the results of the last reply's calls, in their order."""
        if not messages:
            return
        calls = [item["call_id"] for item in self.items if item["type"] == "function_call"][-len(messages) :]
        for call, message in zip(calls, messages, strict=True):
            self.items.append({"type": "function_call_output", "call_id": call, "output": message["content"]})

    def response(self, identity: str, request: Mapping[str, Any], *, was_cut: bool) -> dict[str, Any]:
        """Return the response. request: the API request that would have led to it."""
        return {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "status": "incomplete" if was_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
            "output": self.items,
            "parallel_tool_calls": request.get("parallel_tool_calls", True),
            "tool_choice": request.get("tool_choice", "auto"),
            "tools": request.get("tools") or [],
        }

    def _add(self, kind: str, **item: Any) -> None:
        self.items.append({"id": f"{kind}_{len(self.items)}", **item})
