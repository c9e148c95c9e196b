"""Anthropic's messages and tools as those of chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.environments.agents.api.errors import RequestError

_WITHOUT_EFFECT = ("cache_control", "citations")  # of blocks and tools


def system_message(system: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    text = system if isinstance(system, str) else _text(system, "system")
    return [{"role": "system", "content": text}] if text else []


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools of the client. Raises RequestError for those of Anthropic's servers."""
    made = []
    for index, tool in enumerate(tools):
        match _plain(tool):
            case {"name": str(name), "input_schema": dict(schema), **rest} if rest.keys() <= {
                "description",
                "type",
            } and (rest.get("type", "custom") == "custom"):
                function = {"name": name, "description": rest.get("description", ""), "parameters": schema}
                made.append({"type": "function", "function": function})
            case _:
                kind = tool.get("type") or tool.get("name")
                raise RequestError(
                    f"tools[{index}] is {kind!r:.60}; a tool here has a name, input_schema and description", "tools"
                )
    return made


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        content, role = message.get("content"), message.get("role")
        if unknown := sorted(message.keys() - {"role", "content"}):
            raise RequestError(f"{where}.{unknown[0]}: not a field that this server reads", where, "invalid_messages")
        if role not in ("user", "assistant"):
            raise RequestError(f"{where}.role is {role!r}; it is user or assistant", where, "invalid_messages")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif isinstance(content, list):
            blocks = [_plain(block) for block in content]
            made += [_assistant(blocks, where)] if role == "assistant" else _user(blocks, where)
        else:
            raise RequestError(f"{where}.content must be text, or a list of blocks", where, "invalid_messages")
    return made


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts, calls = [], []
    for index, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text), **rest} if not rest:
                texts.append(text)
            case {"type": "tool_use", "id": str(name), "name": str(function), "input": dict(given), **rest} if not rest:
                called = {"name": function, "arguments": json.dumps(given)}
                calls.append({"id": name, "type": "function", "function": called})
            case _:
                raise _unread(block, f"{where}.content[{index}]", "text and tool_use")
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the results of tools, each a message of its own, and behind them the user's message, if there is one.

    Images of results are in the user's message, since templates show none in a tool's.
    """
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match block:
            case {"type": "text", "text": str(text), **rest} if not rest:
                parts.append({"type": "text", "text": text})
            case {"type": "image"}:
                parts.append(_image(block, place))
            case {"type": "tool_result", "tool_use_id": str(name), **rest} if rest.keys() <= {"content", "is_error"}:
                content = rest.get("content") or ""
                given = content if isinstance(content, list) else [content]
                shown = [each for each in given if isinstance(each, dict) and each.get("type") == "image"]
                parts += [_image(each, f"{place}.content") for each in shown]
                text = _text([each for each in given if each not in shown], f"{place}.content")
                results.append({"role": "tool", "tool_call_id": name, "content": text})
            case _:
                raise _unread(block, place, "text, image in base64, and tool_result")
    return [*results, *([{"role": "user", "content": parts}] if parts else [])]


def _image(block: Any, place: str) -> dict[str, Any]:
    match _plain(block):
        case {
            "type": "image",
            "source": {"type": "base64", "media_type": str(kind), "data": str(data)},
            **rest,
        } if not rest:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    raise _unread(block, place, "images in base64")


def _text(blocks: Any, where: str) -> str:
    texts = []
    for index, block in enumerate(blocks if isinstance(blocks, list) else [blocks]):
        match _plain(block):
            case str(text):
                texts.append(text)
            case {"type": "text", "text": str(text), **rest} if not rest:
                texts.append(text)
            case _:
                raise _unread(block, f"{where}[{index}]", "text, and images in a tool_result")
    return "\n".join(texts)


def _plain(block: Any) -> Any:
    """Return a block or a tool without fields that have no effect here."""
    if not isinstance(block, dict):
        return block
    return {name: value for name, value in block.items() if name not in _WITHOUT_EFFECT and value is not None}


def _unread(block: Any, where: str, known: str) -> RequestError:
    kind = block.get("type") if isinstance(block, dict) else block
    return RequestError(f"{where} is {kind!r:.60}, or has more fields; read are {known}", where, "invalid_messages")
