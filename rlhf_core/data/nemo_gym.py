"""Rows of NeMo Gym: a request in OpenAI's Responses API, and beside it the data of the resource server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.data.formats.base import Row, RowError
from rlhf_core.data.formats.messages import Message, read_messages, read_tools

COLUMN = "nemo_gym"  # of a prompt: the whole row, as NeMo Gym has it
REQUEST = "responses_create_params"
_PARTS = ("reasoning_content", "content", "tool_calls")  # of an assistant turn, in the order of their items


def read_nemo_gym(row: Row) -> Row:
    """Return the prompt, the tools, and the whole row in a column of its own, since its column names may equal ours.

    row: of NeMo Gym, with its `responses_create_params` named `nemo_gym`. Raises RowError that names the place.
    """
    request = row[COLUMN]
    if not isinstance(request, Mapping):
        raise RowError(f"`{COLUMN}` must be `{REQUEST}` of a row of NeMo Gym, this is {type(request).__name__}")
    place = f"{REQUEST}.input"
    messages = read_messages(_messages(request, place), place)
    if messages[-1]["role"] == "assistant":
        raise RowError(f"`{place}` ends with an assistant turn, so there is nothing to answer")
    others = {name: value for name, value in row.items() if name != COLUMN}
    return {
        "prompt": messages,
        COLUMN: {**others, REQUEST: dict(request)},
        **read_tools(dict(request), ("tools",)),
    }


def _messages(request: Mapping[str, Any], place: str) -> list[Message]:
    """Return the messages of the input, whose items may be parts of one turn."""
    input_items = request.get("input")
    items = [{"role": "user", "content": input_items}] if isinstance(input_items, str) else input_items
    if not isinstance(items, list | tuple) or not items:
        raise RowError(f"`{place}` must be text or a list of items, this is {_shown(input_items)}")
    instructions = request.get("instructions")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        match item:
            case {"type": "function_call", "call_id": identity, "name": name, "arguments": arguments}:
                call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
                turn = _turn(messages, "tool_calls")
                turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
            case {"type": "function_call_output", "call_id": identity, "output": output}:
                messages.append({"role": "tool", "tool_call_id": identity, "content": output})
            case {"type": "reasoning", "summary": [*parts]}:
                _turn(messages, "reasoning_content")["reasoning_content"] = "".join(
                    str(part.get("text", "")) for part in parts if isinstance(part, Mapping)
                )
            case {"role": "assistant", "content": content} if item.get("type", "message") == "message":
                _turn(messages, "content")["content"] = content
            case {"role": role, "content": content} if item.get("type", "message") == "message":
                messages.append({"role": role, "content": content})
            case _:
                raise RowError(
                    f"`{place}[{index}]` is {_shown(item)}; it must be a message, a reasoning, a function_call or a "
                    "function_call_output",
                    f"`{place}` has an item of another type",
                )
    return messages


def _turn(messages: list[Message], part: str) -> Message:
    """Return the assistant turn that the part belongs to: the last one, if such a part may still follow in it."""
    last = messages[-1] if messages else {}
    later = _PARTS[_PARTS.index(part) + (part == "tool_calls") :]
    if last.get("role") != "assistant" or any(name in last for name in later):
        messages.append({"role": "assistant"})
    return messages[-1]


def _shown(value: Any) -> str:
    kind = value.get("type", value.get("role")) if isinstance(value, Mapping) else None
    return f"of the type {str(kind)[:40]!r}" if kind is not None else type(value).__name__
