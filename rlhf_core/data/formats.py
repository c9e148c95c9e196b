"""Canonical rows: what every dataset artifact holds, whatever its source looked like.

    text           {id, text}
    conversations  {id, messages: [messages], tools?}                        at least one assistant turn
    preferences    {id, prompt: [messages], chosen: str, rejected: str, margin?: float, tools?}
    prompts        {id, prompt: [messages], answer?: str, task?: str, metadata?: dict, tools?, and all other columns}
    a message      {role, content: str, tool_calls?, reasoning_content?, name?, tool_call_id?}

`id` is a prefix of the SHA-256 of the row's content. A source may write a prompt as plain text, messages as
`{from, value}`, and chosen and rejected as text, as one message, or as whole conversations that share a prompt.
Tools and tool calls are read by rlhf_core/data/tools.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf_core.config.data import DataFormat
from rlhf_core.data.tools import ToolError, canonical_tool_calls, canonical_tools
from rlhf_core.errors import did_you_mean

Row = dict[str, Any]
Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}
_TEXT_KEYS = ("reasoning_content", "name", "tool_call_id")  # of a message
_ID_LENGTH = 16  # hex digits: 64 bits


class RowError(ValueError):
    """A row does not fit its format; the text says how, the caller adds where.

    reason: the same without the values of this row, so that rows with the same fault can be counted together.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message

    def at(self, where: str) -> RowError:
        """The same error with its place in front."""
        return RowError(f"{where}: {self}", self.reason)


def canonical_row(source: Mapping[str, Any], data_format: DataFormat, columns: Mapping[str, str]) -> Row:
    """`source` in the canonical form of `data_format`, with its `id`.

    columns: canonical column -> the source's column.
    Raises RowError that names the column, and the columns there are.
    """
    renamed = _renamed(source, columns)
    row = _FORMATS[data_format](renamed)
    if data_format != "text":
        row |= _tools(renamed)
    row.pop("id", None)
    return {"id": row_id(row), **row}


def row_id(row: Mapping[str, Any]) -> str:
    """Content hash of a canonical row without its `id`."""
    try:
        content = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can escape and UTF-8 cannot hold
        reason = "a text is not valid Unicode"
        raise RowError(f"{reason} ({error.reason})", reason) from error
    except (TypeError, ValueError) as error:
        reason = "a value cannot be written as JSON"
        raise RowError(f"{reason} ({error})", reason) from error
    return hashlib.sha256(content).hexdigest()[:_ID_LENGTH]


def missing_column(name: str, known: Iterable[str]) -> RowError:
    names = sorted(known)
    reason = f"no column `{name}`"
    known_names = ", ".join(names) or "none"
    return RowError(f"{reason}{did_you_mean(name, names)}; it has {known_names} (see `columns` in the recipe)", reason)


def normalised(text: str) -> str:
    """`text` with every run of whitespace as one space, none at the ends: how texts are compared."""
    return " ".join(text.split())


def prompt_text(row: Mapping[str, Any]) -> str:
    """What was asked, of a canonical row of any format: the user's turns (of a text row the whole text), normalised."""
    if "text" in row:
        return normalised(row["text"])
    return normalised("\n".join(_user_turns(row)))


def asked_texts(row: Mapping[str, Any]) -> set[str]:
    """All texts under which a prompt of another dataset may occur in this row, which is not a text row, normalised."""
    turns = _user_turns(row)
    openings = {normalised("\n".join(turns[: end + 1])) for end in range(len(turns))}
    return openings | {normalised(turn) for turn in turns}


def whole_text(row: Mapping[str, Any]) -> str:
    """Everything that a canonical row of any format says, normalised: of a conversation all turns, of a pair both
    completions."""
    if "text" in row:
        return normalised(row["text"])
    messages = row["messages"] if "messages" in row else row["prompt"]
    completions = [row[side] for side in ("chosen", "rejected") if "messages" not in row and side in row]
    return normalised("\n".join([*(message["content"] for message in messages), *map(str, completions)]))


def duplicate_key(row: Mapping[str, Any], data_format: DataFormat) -> str:
    """Rows with the same key are duplicates: the same prompt, or in other formats the same content."""
    if data_format != "prompts":
        return str(row["id"])
    turns = [[m["role"], normalised(m["content"])] for m in row["prompt"]]
    calls = [message["tool_calls"] for message in row["prompt"] if "tool_calls" in message]
    prompt = json.dumps([turns, calls, row["tools"]] if calls or "tools" in row else turns)
    return hashlib.sha256(prompt.encode()).hexdigest()[: 2 * _ID_LENGTH]


def _user_turns(row: Mapping[str, Any]) -> list[str]:
    messages = row["messages"] if "messages" in row else row["prompt"]
    return [message["content"] for message in messages if message["role"] == "user"]


def _renamed(source: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    for wanted in columns.values():
        if wanted not in source:
            raise missing_column(wanted, source)
    taken = set(columns.values())
    row = {name: value for name, value in source.items() if name not in taken and value is not None}
    return row | {name: source[column] for name, column in columns.items() if source[column] is not None}


def _text(row: Row) -> Row:
    return {"text": _filled(row, "text")}


def _conversation(row: Row) -> Row:
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
    elif _prompt_column(row) is not None:
        completion = "completion" if "completion" in row or "answer" not in row else "answer"
        messages = [*_prompt(row), {"role": "assistant", "content": _filled(row, completion)}]
    else:
        raise missing_column("messages", row)
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("`messages` has no assistant turn, so there is nothing to train on")
    return {"messages": messages}


def _preference(row: Row) -> Row:
    if "chosen" not in row or "rejected" not in row:
        raise missing_column("rejected" if "chosen" in row else "chosen", row)
    chosen_before, chosen = _completion(row["chosen"], "chosen")
    rejected_before, rejected = _completion(row["rejected"], "rejected")
    if chosen_before != rejected_before:
        raise RowError("`chosen` and `rejected` do not answer the same prompt")
    prompt = _prompt(row) if _prompt_column(row) is not None or not chosen_before else chosen_before
    if chosen_before and prompt != chosen_before:
        raise RowError("`prompt` is not what `chosen` and `rejected` answer")
    if chosen == rejected:
        raise RowError("`chosen` and `rejected` are the same")
    preference = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return preference | ({"margin": _number(row["margin"], "margin")} if "margin" in row else {})


def _prompts(row: Row) -> Row:
    prompt = _prompt(row)
    others = {name: value for name, value in row.items() if name != _prompt_column(row)}
    if "answer" in others:
        others["answer"] = _plain(others["answer"], "answer")
    if "task" in others and not isinstance(others["task"], str):
        raise RowError(f"`task` must be text, this is {others['task']!r}", "`task` is not text")
    if "metadata" in others and not isinstance(others["metadata"], dict):
        raise RowError("`metadata` must be a mapping")
    return {"prompt": prompt, **others}


_FORMATS: dict[DataFormat, Callable[[Row], Row]] = {
    "text": _text,
    "conversations": _conversation,
    "preferences": _preference,
    "prompts": _prompts,
}


def _prompt_column(row: Row) -> str | None:
    return next((name for name in ("prompt", "question") if name in row), None)


def _prompt(row: Row) -> list[Message]:
    column = _prompt_column(row)
    if column is None:
        raise missing_column("prompt", row)
    value = row[column]
    if isinstance(value, str):
        return [{"role": "user", "content": _filled(row, column)}]
    messages = _messages(value, column)
    if messages[-1]["role"] == "assistant":
        raise RowError(f"`{column}` ends with an assistant turn, so there is nothing to answer")
    return messages


def _completion(value: Any, column: str) -> tuple[list[Message], str]:
    """The conversation that leads to it, if the source gives one, and the completion's text."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"`{column}` is empty")
        return [], value
    messages = _messages([value] if isinstance(value, Mapping) else value, column)
    *before, reply = messages
    if reply["role"] != "assistant":
        raise RowError(f"`{column}` does not end with an assistant turn")
    if "tool_calls" in reply or "reasoning_content" in reply:
        raise RowError(f"`{column}` ends with tool calls or reasoning_content; a preference compares texts alone")
    return before, reply["content"]


def _messages(value: Any, column: str) -> list[Message]:
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


def _tools(row: Row) -> Row:
    if not row.get("tools"):
        return {}
    try:
        return {"tools": canonical_tools(row["tools"])}
    except ToolError as error:
        raise RowError(f"`tools` {error}") from error


def _filled(row: Row, column: str) -> str:
    if column not in row:
        raise missing_column(column, row)
    text = _plain(row[column], column)
    if not text.strip():
        raise RowError(f"`{column}` is empty")
    return text


def _plain(value: Any, column: str) -> str:
    """Text, or a number as text: answers are often written as numbers in JSON."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"`{column}` must be text, this is {type(value).__name__}", f"`{column}` is not text")
    return str(value)


def _number(value: Any, column: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RowError(f"`{column}` must be a number, this is {value!r}", f"`{column}` is not a number") from error
