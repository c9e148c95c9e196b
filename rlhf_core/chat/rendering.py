"""Conversations rendered as text by the chat template of a tokenizer. Loads no torch.

Content that the template silently drops is an error: the model would be trained on, or prompted with, something else
than the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rlhf_core.chat.call_forms import with_call_form
from rlhf_core.chat.image_messages import for_template, without_images
from rlhf_core.errors import ConversationError, StageError, reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    Tokenizer = PreTrainedTokenizerFast
else:
    Tokenizer = Any  # importing transformers takes a second; the name is for annotations

Message = Mapping[str, Any]  # role, content, and where the row has them tool_calls, reasoning_content, images, ...
Tools = Sequence[Mapping[str, Any]]

NO_TEMPLATE = (
    "the tokenizer has no chat template, which all stages but pre-training need: set the base stage's chat_template to "
    "`chatml`, `llama3`, `plain` or a .jinja file in the recipe's folder, or for a model without chat its "
    "input_template, "
    r'such as "{prompt}\n"'
)
NO_DEFAULT = (
    "none of the tokenizer's chat templates is called `default`, by which conversations are written: call one so, "
    "or set the base stage's chat_template"
)
# Templates that write today's date would give other tokens tomorrow: here it is always the same day.
DATE = datetime(2025, 1, 1)
_OPTIONAL_KEYS = ("tool_calls", "reasoning_content")  # of an assistant message, beside its content
_REMEDY = "give the base stage a chat_template that does, or take them out of the rows"
_CALLS = "; where it writes the `arguments` of tool calls, write `arguments | tojson`"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def template_texts(tokenizer: Tokenizer) -> list[str]:
    """Return its chat templates: one, or several by name. Raises StageError if there is none for conversations."""
    stored: Any = tokenizer.chat_template
    if stored is None:
        raise StageError(NO_TEMPLATE)
    if isinstance(stored, Mapping) and "default" not in stored:
        raise StageError(NO_DEFAULT)
    texts = list(stored.values()) if isinstance(stored, Mapping) else [stored]
    other = next((text for text in texts if not isinstance(text, str)), None)
    if other is not None:
        raise StageError(
            f"the tokenizer's chat_template is {type(other).__name__}, not text: correct it in tokenizer_config.json"
        )
    return texts


def render(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool) -> str:
    """Render the conversation with the template.

    Raises StageError if there is no template or its syntax is wrong, ConversationError if it raises an error.
    """
    if tokenizer.chat_template is None:
        raise StageError(NO_TEMPLATE)
    conversation = for_template(tokenizer, messages)
    calls = any(message.get("tool_calls") for message in messages)
    from jinja2 import TemplateSyntaxError

    try:
        text = tokenizer.apply_chat_template(
            conversation,
            tools=_schemas(tools),
            chat_template=_template(tokenizer, tools) if calls else None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            strftime_now=DATE.strftime,
        )
    except TemplateSyntaxError as error:
        raise StageError(f"syntax error in line {error.lineno} of the chat template: {error.message}") from error
    except Exception as error:  # a template is a program: it may raise anything, also on purpose
        hint = _CALLS if calls and isinstance(error, TypeError) else ""
        raise ConversationError(f"the chat template refuses a conversation: {reason_of(error)}{hint}") from error
    return str(text)


def require_written(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None) -> None:
    """Raise ConversationError if the template drops tools, tool calls, reasoning, or a turn of another role than the
    assistant's.

    An assistant turn is checked as the last one of its conversation: many templates shorten earlier ones on purpose.
    """
    asks = messages[-1]["role"] != "assistant"
    text = render(tokenizer, messages, tools, generation_prompt=asks)
    if tools and text == _rendered(tokenizer, messages, None, generation_prompt=asks):
        raise ConversationError(
            "the chat template does not write `tools`, so the model would never see them; " + _REMEDY
        )
    others = [index for index, message in enumerate(messages) if message["role"] != "assistant"]
    marked = _rendered(tokenizer, _replaced(messages, others), tools, generation_prompt=asks) or ""
    for index in others:
        if _marker(index) in marked:
            continue  # as nearly always; a template that changes contents is tried on this one alone
        if text == _rendered(tokenizer, _replaced(messages, [index]), tools, generation_prompt=asks):
            raise ConversationError(
                f"the chat template does not write turn {index}, of role {messages[index]['role']}, so the model would "
                f"never see it; {_REMEDY}"
            )
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            _require_keys_written(tokenizer, messages[: index + 1], tools)


def require_reply_written(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None, whole: str) -> None:
    """Raise ConversationError if the template renders `whole` whatever the content of the last turn, an assistant's."""
    index = len(messages) - 1
    if whole == _rendered(tokenizer, _replaced(messages, [index]), tools, generation_prompt=False):
        raise ConversationError(
            f"the chat template does not write turn {index}, of role assistant, so the model would never learn it; "
            f"{_REMEDY}"
        )


def is_written_whole(tokenizer: Tokenizer, row: Mapping[str, Any]) -> bool:
    """Return whether the template renders the last reply unchanged, except for white space, or cannot render the row.

    row: of the format `conversations`.
    """
    last = max(index for index, message in enumerate(row["messages"]) if message["role"] == "assistant")
    try:
        written = render(tokenizer, row["messages"][: last + 1], row.get("tools"), generation_prompt=False)
    except StageError:
        return True
    reply = "".join(row["messages"][last]["content"].split())
    return reply in "".join(written.split())


def _replaced(messages: Sequence[Message], indices: Sequence[int]) -> list[Message]:
    """Return `messages` with a unique content in those at `indices`."""
    return [
        {**without_images(m), "content": _marker(index)} if index in indices else m for index, m in enumerate(messages)
    ]


def _marker(index: int) -> str:
    return f"content-of-turn-{index}-alone"


def _require_keys_written(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None) -> None:
    *before, reply = messages
    for key in _OPTIONAL_KEYS:
        if key not in reply:
            continue
        without = {name: value for name, value in reply.items() if name != key}
        text = render(tokenizer, messages, tools, generation_prompt=False)
        if text == _rendered(tokenizer, [*before, without], tools, generation_prompt=False):
            raise ConversationError(
                f"the chat template does not write `{key}` of turn {len(before)}, so the model would never learn "
                f"them; {_REMEDY}"
            )
    if reply.get("tool_calls"):
        _require_calls_written(tokenizer, before, reply, tools)


def _require_calls_written(
    tokenizer: Tokenizer, before: Sequence[Message], reply: Message, tools: Tools | None
) -> None:
    """Raise ConversationError if the template drops one of several calls, its name or arguments, or the text beside
    them.
    """
    if _all_calls_in(_rendered(tokenizer, [*before, _calls_marked(reply)], tools, generation_prompt=False), reply):
        return  # as nearly always; a template that changes its text is tried on each part alone
    text = render(tokenizer, [*before, reply], tools, generation_prompt=False)
    changed: list[tuple[str, Message]] = []
    if reply["content"].strip():
        changed.append(("the text beside `tool_calls`", {**reply, "content": _marker(len(before))}))
    for index, call in enumerate(reply["tool_calls"]):
        for key, other in (("name", _marker(index)), ("arguments", {_marker(index): _marker(index)})):
            calls = [*reply["tool_calls"]]
            calls[index] = {**call, "function": {**call["function"], key: other}}
            changed.append((f"`tool_calls[{index}].{key}`", {**reply, "tool_calls": calls}))
    for what, message in changed:
        if text == _rendered(tokenizer, [*before, message], tools, generation_prompt=False):
            raise ConversationError(
                f"the chat template does not write {what} of turn {len(before)}, so the model would never learn it; "
                f"{_REMEDY}"
            )


def _calls_marked(reply: Message) -> Message:
    """Return `reply` with unique strings as its text and as each name and argument of its calls."""
    calls = [
        {
            **call,
            "function": {"name": f"name-{_marker(index)}", "arguments": {"argument": f"argument-{_marker(index)}"}},
        }
        for index, call in enumerate(reply["tool_calls"])
    ]
    return {**reply, "content": "text-beside-calls" if reply["content"].strip() else "", "tool_calls": calls}


def _all_calls_in(written: str | None, reply: Message) -> bool:
    """Return whether `written` contains all strings of `_calls_marked`."""
    marked = _calls_marked(reply)
    parts = [f"{kind}-{_marker(index)}" for index in range(len(reply["tool_calls"])) for kind in ("name", "argument")]
    return written is not None and all(part in written for part in [marked["content"], *parts])


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool
) -> str | None:
    """Return the result of `render`; None if the template rejects this conversation."""
    try:
        return render(tokenizer, messages, tools, generation_prompt=generation_prompt)
    except StageError:
        return None


def untagged(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None, start: int) -> str:
    """Return the template's text from character `start` on outside of `{% generation %}`; empty if it has no such
    tag.
    """
    template = _template(tokenizer, tools)
    if not _GENERATION_TAG.search(template):
        return ""
    from transformers.utils.chat_template_utils import render_jinja_template

    variables: dict[str, Any] = {**tokenizer.special_tokens_map, "strftime_now": DATE.strftime}
    rendered: Any = render_jinja_template(
        conversations=[for_template(tokenizer, messages)],
        tools=_schemas(tools),
        chat_template=template,
        return_assistant_tokens_mask=True,
        **variables,
    )
    (text,), (tags,) = rendered
    return "".join(_outside(text, tags, start))


def _template(tokenizer: Tokenizer, tools: Tools | None) -> str:
    """Return the template for conversations with tool calls."""
    return with_call_form(tokenizer, tokenizer.get_chat_template(tools=_schemas(tools)))


def _schemas(tools: Tools | None) -> list[Any] | None:
    return [dict(tool) for tool in tools] if tools else None


def _outside(text: str, tags: Sequence[tuple[int, int]], start: int) -> Iterator[str]:
    for begin, end in sorted(tags):
        yield text[start:begin]
        start = max(start, end)
    yield text[start:]
