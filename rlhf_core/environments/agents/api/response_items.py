"""Items and tools of OpenAI's responses as messages and tools of chat completions, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.environments.agents.api.errors import RequestError
from rlhf_core.environments.agents.api.replies import Answer
from rlhf_core.environments.agents.api.wanted import ANY_OBJECT


def chat_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of input items. Calls behind a message of the assistant are its own."""
    made: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match {name: value for name, value in item.items() if value is not None}:
            case {"role": str(role), "content": content, **rest} if rest.get("type", "message") == "message" and (
                rest.keys() <= {"type", "id", "status", "phase"}
            ):
                made.append({"role": role, "content": _content(content, where)})
            case {
                "type": "function_call",
                "call_id": str(name),
                "name": str(function),
                "arguments": str(given),
                **rest,
            } if rest.keys() <= {"id", "status"}:
                if not made or made[-1]["role"] != "assistant":
                    made.append({"role": "assistant", "content": ""})
                call = {"id": name, "type": "function", "function": {"name": function, "arguments": given}}
                made[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": str(name), "output": output, **rest} if rest.keys() <= {
                "id",
                "status",
            }:
                made.append({"role": "tool", "tool_call_id": name, "content": _content(output, where)})
            case _:
                raise RequestError(
                    f"{where} is {item.get('type', 'message')!r:.60}, or has other fields; read are messages, "
                    "function_call and function_call_output",
                    where,
                )
    return made


def _content(content: Any, where: str) -> Any:
    """Return the content of an item as chat completions have it."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content if isinstance(content, list) else [content]):
        match part:
            case {"type": "input_text" | "output_text", "text": str(text), **rest} if rest.keys() <= {
                "annotations", "logprobs"
            }:  # fmt: skip
                parts.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str(url), **rest} if not rest or rest == {"detail": "auto"}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case _:
                kind = part.get("type") if isinstance(part, dict) else part
                place = f"{where}.content[{index}]"
                raise RequestError(
                    f"{place} is {kind!r:.60}; read are input_text, output_text, and input_image as a data URL", place
                )
    return parts


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools of the client. Raises RequestError for those of OpenAI's servers."""
    made = []
    for index, tool in enumerate(tools):
        match {name: value for name, value in tool.items() if value is not None}:
            case {"type": "function", "name": str(), **rest} if rest.keys() <= {"description", "parameters", "strict"}:
                function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name)}
                made.append({"type": "function", "function": function})
            case _:
                raise RequestError(
                    f"tools[{index}] is {tool.get('type')!r:.60}; a tool here is a function, with a name, description "
                    "and parameters",
                    "tools",
                )
    return made


def schema_of(form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    match form:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return ANY_OBJECT
        case {"type": "json_schema", "name": str(), "schema": dict(schema)}:
            return schema
    raise RequestError(
        f"text.format is {form!r:.100}; it is text, json_object, or json_schema with a name and a schema", "text.format"
    )


def items_of(name: str, answer: Answer, scores: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a reply. name: of the response. scores: of its tokens, if they are wanted."""
    items: list[dict[str, Any]] = []
    status = "incomplete" if answer.call.completion.finish_reason == "length" else "completed"
    if answer.text or not answer.calls:
        items.append(message_item(name, status, [text_part(answer.text, scores)]))
    items += [
        call_item(name, number, call.id, call.name, call.arguments, "completed")
        for number, call in enumerate(answer.calls)
    ]
    return items


def text_part(text: str, scores: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(scores)}


def message_item(name: str, status: str, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": list(content)}


def call_item(name: str, number: int, identity: str, function: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{name}_{number}", "type": "function_call", "call_id": identity, "name": function,
        "arguments": arguments, "status": status,
    }  # fmt: skip
