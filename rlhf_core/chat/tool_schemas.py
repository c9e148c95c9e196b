"""Tools and tool calls of a row, in the canonical form of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.system.json_text import JSONTextError, parse_json

_FORM = "{type: function, function: {name, …}}"
_OTHER_ARGUMENTS = ("parameters", "args", "input", "params", "kwargs", "argument")  # what others call them in a call


class ToolError(ValueError):
    """Malformed tools or tool calls; the text continues a sentence that names the column."""


def canonical_tools(value: Any) -> list[dict[str, Any]]:
    """Return JSON schemas as `{type: function, function: {name, …}}`; none of an empty list.

    value: a list of them, or of contents of `function`; or the list as JSON text.
    """
    value = _json(value, "is") if isinstance(value, str) else value
    return [] if value == [] else [_function(tool, index) for index, tool in enumerate(_list(value))]


def canonical_tool_calls(value: Any) -> list[dict[str, Any]]:
    """Return calls as `{type: function, function: {name, arguments: mapping}}`, with the `id` if there is one.

    value: a list of them, or of `{name, arguments}`; or the list as JSON text; arguments may be JSON text.
    """
    calls = []
    for index, raw_call in enumerate(_list(value)):
        call = _function(raw_call, index)
        other = next((name for name in _OTHER_ARGUMENTS if call["function"].get(name) not in (None, {}, "")), None)
        if other is not None:
            raise ToolError(f"[{index}] has its arguments in `{other}`: call that `arguments`")
        arguments = call["function"].get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments, f"[{index}]: the arguments are")
        if not isinstance(arguments, Mapping):
            raise ToolError(f"[{index}]: the arguments must be a mapping, this is {type(arguments).__name__}")
        calls.append({**call, "function": {"name": call["function"]["name"], "arguments": dict(arguments)}})
    return calls


def _list(value: Any) -> Sequence[Any]:
    value = _json(value, "is") if isinstance(value, str) else value
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ToolError(f"must be a list of {_FORM}")
    return value


def _function(value: Any, index: int) -> dict[str, Any]:
    """Return `{type: function, function: {name, …}}`, and an `id` beside it."""
    if not isinstance(value, Mapping):
        raise ToolError(f"[{index}] must be {_FORM}, this is {type(value).__name__}")
    if value.get("type", "function") not in ("function", None):
        raise ToolError(f"[{index}] is of type {value['type']!r}; only functions can be called")
    function = value.get("function", {name: item for name, item in value.items() if name not in ("type", "id")})
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise ToolError(f"[{index}] has no function name; it must be {_FORM}")
    identity = {"id": value["id"]} if isinstance(value.get("id"), str) else {}
    return {**identity, "type": "function", "function": dict(function)}


def _json(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except JSONTextError as error:
        raise ToolError(f"{what} text that is not valid JSON ({error})") from error
