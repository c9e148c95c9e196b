"""A request for replies, as all APIs of the policy express it, and the structure that it asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.environments.agents.api.conversations import Message
from rlhf_core.environments.agents.api.errors import RequestError

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Wanted:
    messages: Sequence[Message]  # of chat completions, normalised
    tools: Sequence[Mapping[str, Any]] = ()  # of chat completions
    must_call: Sequence[str] = ()  # names of tools, one of which must be called; none: the policy chooses
    parallel_calls: bool = True  # it may call several at once where it must call
    schema: Mapping[str, Any] | None = None  # JSON schema of the text
    count: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    top_logprobs: int = 0
    temperature: float | None = None
    top_p: float | None = None

    @property
    def structure(self) -> str | None:
        """The JSON schema of the whole reply; None: the policy is free.

        Calls are a list of {name, parameters}. If text has a schema and there are tools, a reply is either of the two.
        """
        if self.must_call:
            return json.dumps(_with_definitions(self._calls()))
        if self.schema is None:
            return None
        return json.dumps(_with_definitions({"anyOf": [self.schema, self._calls()]}) if self.tools else self.schema)

    def _calls(self) -> dict[str, Any]:
        names = self.must_call or [tool["function"]["name"] for tool in self.tools]
        calls = [_call(tool["function"]) for tool in self.tools if tool["function"]["name"] in names]
        most = {} if self.parallel_calls else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"enum": [function["name"]]}, "parameters": function.get("parameters") or ANY_OBJECT},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _with_definitions(schema: Any) -> Any:
    """Move the definitions inside of a schema to its root, where references look for them.

    Raises RequestError if two of one name differ.
    """
    found: dict[str, Any] = {}

    def without(part: Any) -> Any:
        if isinstance(part, list):
            return [without(each) for each in part]
        if not isinstance(part, dict):
            return part
        definitions = part.get("$defs")
        if isinstance(definitions, dict):
            part = {name: value for name, value in part.items() if name != "$defs"}
            for name, definition in definitions.items():
                value = without(definition)
                if found.setdefault(name, value) != value:
                    raise RequestError(f"two schemas define `$defs.{name}` differently: rename one", "tools")
        return {name: without(value) for name, value in part.items()}

    moved = without(schema)
    return {**moved, "$defs": found} if found else moved


def read_tools(tools: Sequence[Any], where: str = "tools") -> list[dict[str, Any]]:
    """Validate tools of chat completions. Raises RequestError for anything but a function with a name."""
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(), **rest}} if isinstance(
                rest.get("parameters", {}), dict
            ):
                continue
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RequestError(f"{where}[{index}] is {kind!r:.60}; tools are functions, with a name and parameters", where)
    return list(tools)


def names_to_call(tools: Sequence[Mapping[str, Any]], choice: str, name: str | None = None) -> list[str]:
    """Return the tools, one of which must be called. choice: auto or required; name: of the one that must be.

    Raises RequestError if there is none.
    """
    names = [tool["function"]["name"] for tool in tools]
    if name is None and choice == "auto":
        return []
    wanted = [each for each in names if name in (None, each)]
    if not wanted:
        raise RequestError(f"tool_choice demands a call of {name or 'a tool'}, which is not in `tools`", "tool_choice")
    return wanted
