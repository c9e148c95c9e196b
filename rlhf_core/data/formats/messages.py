"""Messages in rows: prompts, conversations, completions, and their tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core.chat.image_messages import IMAGE, ImagePart, compared_text, images_in
from rlhf_core.chat.tool_schemas import ToolError, canonical_tool_calls, canonical_tools
from rlhf_core.config.texts import is_blank
from rlhf_core.data.formats.base import Format, MissingColumnError, Row, RowError, filled, plain
from rlhf_core.system.json_text import JSONTextError, parse_json

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
# As data sets call them: OpenAI's, ShareGPT's and its collections'.
_ROLE_NAMES = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation"), "tool"),
}
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "question", *MESSAGE_COLUMNS)
_TOOL_COLUMNS = ("tools", "functions")  # the latter as OpenAI had it first
BESIDE_MESSAGES = ("system", *_TOOL_COLUMNS)
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_KEYS = ("name", "tool_call_id")  # of a message
_TEXT_PARTS = ("text", "input_text", "output_text")
_TRAINED_KEYS = ("weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_mask")
_TRAINED = ("1", "1.0", "true")  # their values in ordinary turns
_MASKED_KEYS = ("mask", "masked", "train_detail", "training_detail")  # to some true is trained, to others masked
_NO_TEXT_KEYS = ("image", "images", "image_url", "video", "videos", "audio", "audios")  # of a row, or a message


class MessageFormat(Format):
    """A format whose rows contain messages, and beside them the callable `tools`."""

    column: str  # that holds the messages
    tool_columns: tuple[str, ...] = _TOOL_COLUMNS

    def canonical(self, row: Row) -> Row:
        _require_text(row, "")
        canonical = self.without_tools(row) | read_tools(row, self.tool_columns)
        return canonical | {self.column: _with_system(row, canonical[self.column])}

    def unread(self, columns: frozenset[str]) -> frozenset[str]:
        """Return the columns that are not read: of several prompt columns, all but the first."""
        prompt_columns = [name for name in PROMPT_COLUMNS if name in columns]
        return super().unread(columns) | (frozenset(prompt_columns[1:]) if self.reads is not None else frozenset())

    @abstractmethod
    def without_tools(self, row: Row) -> Row:
        """Return `canonical` without the column `tools`."""

    def asked_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join(self._user_turns(row))

    def asked_texts(self, row: Mapping[str, Any]) -> list[str]:
        """Return the user's turns up to each of them, and each alone."""
        turns = self._user_turns(row)
        return ["\n".join(turns[: end + 1]) for end in range(len(turns))] + turns

    def whole_text(self, row: Mapping[str, Any]) -> str:
        return "\n".join(map(compared_text, row[self.column]))

    def _user_turns(self, row: Mapping[str, Any]) -> list[str]:
        return [compared_text(message) for message in row[self.column] if message["role"] == "user"]


def prompt_column(row: Row) -> str | None:
    return next((name for name in PROMPT_COLUMNS if name in row), None)


def read_prompt(row: Row) -> list[Message]:
    column = prompt_column(row)
    if column is None:
        raise MissingColumnError("prompt", row)
    value = row[column]
    if isinstance(value, str) and column not in MESSAGE_COLUMNS:
        return [{"role": "user", "content": filled(row, column)}]
    if not isinstance(value, str | list | tuple):
        kind = type(value).__name__
        raise RowError(f"`{column}` must be text or a list of messages, this is {kind}", f"`{column}` is {kind}")
    messages = read_messages(value, column)
    if messages[-1]["role"] == "assistant":
        raise RowError(f"`{column}` ends with an assistant turn, so there is nothing to answer")
    return messages


def read_completion(value: Any, column: str) -> tuple[list[Message], str]:
    """Return the conversation before the completion, if there is one, and the completion's text."""
    if isinstance(value, str):
        if is_blank(value):
            raise RowError(f"`{column}` is empty")
        return [], value
    if not isinstance(value, Mapping | list | tuple):
        kind = type(value).__name__
        raise RowError(f"`{column}` must be text or messages, this is {kind}", f"`{column}` is {kind}")
    return last_reply(read_messages([value] if isinstance(value, Mapping) else value, column), column)


def last_reply(messages: Sequence[Message], column: str) -> tuple[list[Message], str]:
    """Return the messages before the last one, and its text. Raises RowError if it is no reply of text only."""
    *before, reply = messages
    if reply["role"] != "assistant":
        raise RowError(f"`{column}` does not end with an assistant turn")
    if "tool_calls" in reply or "reasoning_content" in reply:
        raise RowError(f"`{column}` ends with tool calls or reasoning_content; a preference compares texts alone")
    return before, reply["content"]


def read_messages(value: Any, column: str) -> list[Message]:
    """Read messages. value: a list of messages, or the list as JSON text, as in CSV."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except JSONTextError as error:
            raise RowError(
                f"`{column}` must be a list of messages, this is text: {error}", f"`{column}` is text"
            ) from error
    if not isinstance(value, list | tuple) or not value:
        what = "has no messages" if isinstance(value, list | tuple) else f"is {type(value).__name__}"
        raise RowError(f"`{column}` {what}; it must be a list of messages {{role, content}}")
    messages = [_message(message, column, index) for index, message in enumerate(value)]
    _require_answers_follow_calls(messages, column)
    return messages


def _require_answers_follow_calls(messages: Sequence[Message], column: str) -> None:
    """Raise RowError if all calls have ids and a result does not follow its call. Few templates check this."""
    call_ids: set[object] = set()
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for index, message in enumerate(messages):
        call_ids |= {call.get("id") for call in message.get("tool_calls", ())}
        answered = message.get("tool_call_id") if message["role"] == "tool" else None
        if answered is not None and answered not in call_ids and calls and all("id" in call for call in calls):
            raise RowError(
                f"`{column}[{index}]` answers the call {str(answered)[:40]!r}, which no turn before it makes: correct "
                "`tool_call_id`",
                f"`{column}` has an answer to a call that no turn before it makes",
            )


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    """Prepend the column `system` as the first turn, as in ShareGPT's collections."""
    if not row.get("system"):
        return messages
    text = plain(row["system"], "system")
    if is_blank(text):
        return messages
    if messages[0]["role"] == "system":
        if messages[0]["content"] != text:
            raise RowError("the column `system` differs from the first message, which is of the role system")
        return messages
    return [{"role": "system", "content": text}, *messages]


def _message(value: Any, column: str, index: int) -> Message:
    where = f"{column}[{index}]"
    if not isinstance(value, Mapping):
        raise RowError(
            f"`{where}` must be a message {{role, content}}, this is {type(value).__name__}",
            f"`{column}` has an entry that is not a message",
        )
    present = {name: item for name, item in value.items() if item is not None}
    _require_text(present, f"{where}.")
    named = _agreed(present, ("role", "from"), where, column, role_of)
    if named is None:
        raise RowError(f"`{where}` has no `role`; it must be a message {{role, content}}", f"`{column}` lacks a role")
    role = role_of(named)
    if role is None:
        raise RowError(
            f"`{where}` has the role {str(named)[:40]!r}; roles are {', '.join(ROLES)}",
            f"`{column}` has an unknown role",
        )
    raw_content = _agreed(present, ("content", "value"), where, column)
    content = _text(raw_content, where, column)
    message: Message = {"role": role, "content": content} | _other_fields(present, role, where, column)
    if images := images_in(raw_content):
        message["images"] = images
        _require_images_fit(message, where, column)
    if named == "function_call":  # the text contains the call
        message |= {"content": "", "tool_calls": _tool_calls(content, where, column)}
    if is_blank(message["content"]) and "tool_calls" not in message:
        raise RowError(f"`{where}` has no text in `content`", f"`{column}` has a message without text")
    return message


def role_of(named: Any) -> str | None:
    """Return the role with this name in data sets; None if there is none."""
    return _ROLE_NAMES.get(named) if isinstance(named, str) else None


def _agreed(
    fields: Mapping[str, Any], names: Sequence[str], where: str, column: str, meaning: Callable[[Any], Any] = repr
) -> Any:
    """Return the value under one of several synonymous names; None if all are absent. meaning: the key by which two are
    compared.
    """
    present = [name for name in names if _is_present(fields, name)]
    for other in present[1:]:
        if meaning(fields[other]) != meaning(fields[present[0]]):
            raise RowError(
                f"`{where}` differs in `{present[0]}` and `{other}`: remove one",
                f"`{column}` has a message with two contents",
            )
    return fields[present[0]] if present else None


def _is_present(fields: Mapping[str, Any], name: str) -> bool:
    """Return whether the value is neither null nor empty. An array, which functions may return, has no truth value."""
    value = fields.get(name)
    return value is not None and value is not False and not (isinstance(value, Sequence | Mapping) and not value)


def _require_text(fields: Mapping[str, Any], place: str) -> None:
    """Raise RowError for content other than text. fields: a row, or a message of one at `place`."""
    for name in _NO_TEXT_KEYS:
        if _is_present(fields, name):
            rest = "" if place else f", or remove it by `columns: {{unused: {name}}}`"
            raise RowError(
                f"`{place}{name}` accompanies the text, but rows hold only text, and in `conversations`, `prompts`, "
                f"`preferences` and `unpaired` images (see docs/guides/vision.md): remove such rows{rest}",
                f"`{name}` accompanies the text",
            )


def _text(content: Any, where: str, column: str) -> str:
    """Return the text of a content: text, or parts that are all text. Templates treat null differently."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise RowError(
            f"`{where}` has no text in `content`, but {type(content).__name__}",
            f"`{column}` has a message whose content is not text",
        )
    return "".join(part if isinstance(part, str) else _part_text(part, where, column) for part in content)


def _require_images_fit(message: Message, where: str, column: str) -> None:
    if message["role"] == "assistant":
        raise RowError(f"`{where}` has images, but models write text alone", f"`{column}` has a reply with images")
    if message["content"].count(IMAGE) != len(message["images"]):
        raise RowError(
            f"`{where}` holds the character U+FFFC, which stands for an image there: take it out of the text",
            f"`{column}` has a text with images that holds U+FFFC",
        )


def _part_text(part: Any, where: str, column: str) -> str:
    if isinstance(part, ImagePart):
        return IMAGE
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in _TEXT_PARTS and not isinstance(part.get("text"), str):
        raise RowError(f"`{where}.content` has a part of the type {kind!r} whose `text` is not text")
    if not isinstance(part, Mapping) or kind not in _TEXT_PARTS:
        raise RowError(
            f"`{where}.content` has a part of the type {str(kind)[:40]!r}: rows hold only text, and in "
            "`conversations`, `prompts`, `preferences` and `unpaired` images, take it out",
            f"`{column}` has a content that is not text alone",
        )
    text: str = part["text"]
    return text


def _other_fields(fields: Mapping[str, Any], role: str, where: str, column: str) -> Message:
    """Return the fields of a message that templates read beside its role and content; null or empty ones are absent."""
    message: Message = {name: fields[name] for name in _TEXT_KEYS if fields.get(name)}
    reasoning = _agreed(fields, _REASONING, where, column)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    for name, text in message.items():
        if not isinstance(text, str):
            raise RowError(f"`{where}.{name}` must be text, this is {type(text).__name__}")
    if fields.get("tool_calls") and fields.get("function_call"):
        raise RowError(f"`{where}` has both `tool_calls` and `function_call`: remove one")
    calls = fields.get("tool_calls") or ([fields["function_call"]] if fields.get("function_call") else None)
    if role != "assistant" and (calls or reasoning is not None):
        name = "tool_calls" if calls else "reasoning_content"
        raise RowError(f"`{where}` has `{name}`, but only assistant turns may")
    weighed = next((name for name in _TRAINED_KEYS if str(fields.get(name, 1)).lower() not in _TRAINED), None)
    weighed = weighed or next((name for name in _MASKED_KEYS if name in fields), None)
    if role == "assistant" and weighed is not None:
        raise RowError(
            f"`{where}.{weighed}` is {fields[weighed]}, but every assistant turn is trained, all alike: take it out of "
            "the row, and where the turn is not to be trained the turns from this one on",
            f"`{column}` has turns that are not to be trained",
        )
    return message | ({"tool_calls": _tool_calls(calls, where, column)} if calls else {})


def _tool_calls(calls: Any, where: str, column: str) -> list[dict[str, Any]]:
    try:
        call = parse_json(calls) if isinstance(calls, str) else calls
        return canonical_tool_calls([call] if isinstance(call, Mapping) else call)
    except JSONTextError as error:
        sentence = f"is text that is not valid JSON ({error})"
        raise RowError(f"`{where}.tool_calls` {sentence}", f"`{column}` has wrong tool calls") from error
    except ToolError as error:
        raise RowError(f"`{where}.tool_calls` {error}", f"`{column}` has wrong tool calls") from error


def read_tools(row: Row, columns: Sequence[str]) -> Row:
    """Return the column `tools` of a canonical row, from any of these columns; empty if there are none."""
    tools_by_column: dict[str, list[dict[str, Any]]] = {}
    for name in columns:
        try:
            tools_by_column |= {name: tools} if (tools := canonical_tools(row.get(name) or [])) else {}
        except ToolError as error:
            raise RowError(f"`{name}` {error}", f"`{name}` are wrong") from error
    if len(tools_by_column) > 1:
        raise RowError("the row has both `tools` and `functions`: remove one, such as by `columns`")
    return {"tools": next(iter(tools_by_column.values()))} if tools_by_column else {}
