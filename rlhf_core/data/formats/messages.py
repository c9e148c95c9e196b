"""Messages in rows: prompts, conversations, completions, and the tools that belong to them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.data.formats.base import Format, Row, RowError, filled, missing_column
from rlhf_core.data.tools import ToolError, canonical_tool_calls, canonical_tools

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}
_TEXT_KEYS = ("reasoning_content", "name", "tool_call_id")  # of a message


class MessageFormat(Format):
    """A format whose rows hold messages, and beside them the `tools` that may be called."""

    column: str  # that holds the messages

    def canonical(self, row: Row) -> Row:
        return self.without_tools(row) | read_tools(row)

    @abstractmethod
    def without_tools(self, row: Row) -> Row:
        """As `canonical`, without the column `tools`."""

    def asked_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join(self._user_turns(row))

    def asked_texts(self, row: Mapping[str, Any]) -> list[str]:
        """The user's turns up to each of them, and each alone."""
        turns = self._user_turns(row)
        return ["\n".join(turns[: end + 1]) for end in range(len(turns))] + turns

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join(message["content"] for message in row[self.column])

    def _user_turns(self, row: Mapping[str, Any]) -> list[str]:
        return [message["content"] for message in row[self.column] if message["role"] == "user"]


def prompt_column(row: Row) -> str | None:
    return next((name for name in ("prompt", "question") if name in row), None)


def read_prompt(row: Row) -> list[Message]:
    column = prompt_column(row)
    if column is None:
        raise missing_column("prompt", row)
    value = row[column]
    if isinstance(value, str):
        return [{"role": "user", "content": filled(row, column)}]
    messages = read_messages(value, column)
    if messages[-1]["role"] == "assistant":
        raise RowError(f"`{column}` ends with an assistant turn, so there is nothing to answer")
    return messages


def read_completion(value: Any, column: str) -> tuple[list[Message], str]:
    """The conversation that leads to it, if the source gives one, and the completion's text."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"`{column}` is empty")
        return [], value
    messages = read_messages([value] if isinstance(value, Mapping) else value, column)
    *before, reply = messages
    if reply["role"] != "assistant":
        raise RowError(f"`{column}` does not end with an assistant turn")
    if "tool_calls" in reply or "reasoning_content" in reply:
        raise RowError(f"`{column}` ends with tool calls or reasoning_content; a preference compares texts alone")
    return before, reply["content"]


def read_messages(value: Any, column: str) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise RowError(f"`{column}` must be a list of messages {{role, content}}")
    return [_message(message, column, index) for index, message in enumerate(value)]


def _message(value: Any, column: str, index: int) -> Message:
    where = f"{column}[{index}]"
    if not isinstance(value, Mapping):
        raise RowError(
            f"`{where}` must be a message {{role, content}}, this is {type(value).__name__}",
            f"`{column}` has an entry that is no message",
        )
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if role not in _ROLE_NAMES:
        raise RowError(
            f"`{where}` has the role {role!r}; roles are {', '.join(ROLES)}", f"`{column}` has an unknown role"
        )
    message = {"role": _ROLE_NAMES[role], "content": content} | _beside_content(value, _ROLE_NAMES[role], where)
    if content is None and "tool_calls" in message:
        message["content"] = ""  # templates differ in what they do with null
    elif not isinstance(content, str) or not (content.strip() or "tool_calls" in message):
        raise RowError(f"`{where}` has no text in `content`", f"`{column}` has a message without text")
    return message


def _beside_content(value: Mapping[str, Any], role: str, where: str) -> Message:
    """What templates read of a message beside its role and content. A column of null or nothing counts as absent."""
    given = {name: value[name] for name in ("tool_calls", *_TEXT_KEYS) if value.get(name)}
    for name in given:
        if name in ("tool_calls", "reasoning_content") and role != "assistant":
            raise RowError(f"`{where}` has `{name}`, but only assistant turns may")
        if name in _TEXT_KEYS and not isinstance(given[name], str):
            raise RowError(f"`{where}.{name}` must be text, this is {type(given[name]).__name__}")
    if "tool_calls" in given:
        try:
            given["tool_calls"] = canonical_tool_calls(given["tool_calls"])
        except ToolError as error:
            raise RowError(f"`{where}.tool_calls` {error}") from error
    return given


def read_tools(row: Row) -> Row:
    if not row.get("tools"):
        return {}
    try:
        return {"tools": canonical_tools(row["tools"])}
    except ToolError as error:
        raise RowError(f"`tools` {error}") from error
