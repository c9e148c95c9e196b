"""The form of tool calls in a chat template. Loads no torch.

In canonical rows `arguments` is a mapping, as in transformers. Templates that join `arguments` as text, such as those
of DeepSeek, raise an error for a mapping, or write it as Python does. Such a template is prefixed with statements that
replace it by JSON text, so that every renderer, vLLM's server too, writes the same.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

_NAME, _VALUE = "name-of-a-call", "value-of-an-argument"
_ARGUMENTS = {"argument": _VALUE}
# A mapping, and JSON text as a value of JSON or of Python, as templates write them that do not take this form.
_WRONG = (repr(_ARGUMENTS), json.dumps(json.dumps(_ARGUMENTS)), repr(json.dumps(_ARGUMENTS)))
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_SCHEMA = {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}
_ASKED = {"role": "user", "content": "question"}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_ANSWERED = [
    {"role": "tool", "content": "result", "name": _NAME, "tool_call_id": _CALL["id"]},
    {"role": "assistant", "content": "answer"},
]
# The last tag keeps a line end that the template begins with.
_TEXT = """\
{%- set calling = namespace(messages=[], calls=[]) %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- set calling.calls = [] %}
{%- for call in message.tool_calls %}
{%- set arguments = call.function.arguments %}
{%- set arguments = arguments if arguments is string else arguments | tojson %}
{%- set calling.calls = calling.calls + [dict(call, function=dict(call.function, arguments=arguments))] %}
{%- endfor %}
{%- set calling.messages = calling.messages + [dict(message, tool_calls=calling.calls CONTENT)] %}
{%- else %}
{%- set calling.messages = calling.messages + [message] %}
{%- endif %}
{%- endfor %}
{%- set messages = calling.messages +%}"""
_NO_CONTENT = _TEXT.replace(" CONTENT", ", content=message.content or none")  # DeepSeek R1 writes no calls beside ""
_FORMS = (
    "",  # as they are
    _TEXT.replace(" CONTENT", ""),
    _NO_CONTENT,
    _NO_CONTENT.replace("arguments if arguments is string else arguments | tojson", "arguments"),
)


def with_call_form(tokenizer: Any, template: str) -> str:
    """Return `template`, changed if needed to write tool calls whose arguments are mappings, if it can write calls at
    all.

    tokenizer: a PreTrainedTokenizerFast, whose special tokens the template may write.
    """
    return _form(tokenizer, template) + template if "tool_calls" in template else template


@lru_cache(maxsize=32)
def _form(tokenizer: Any, template: str) -> str:
    return next((form for form in _FORMS if _writes_calls(tokenizer, form + template)), _FORMS[0])


def _writes_calls(tokenizer: Any, template: str) -> bool:
    """Return whether the template writes name and arguments of a call, the latter as JSON or in a form of its own.

    Some templates accept calls only with their results, or beside tools.
    """
    return any(
        _NAME in text and _VALUE in text and not any(wrong in text for wrong in _WRONG)
        for messages in ([_ASKED, _CALLING], [_ASKED, _CALLING, *_ANSWERED])
        for tools in (None, [_SCHEMA])
        for text in [_written(tokenizer, template, messages, tools)]
    )


def _written(tokenizer: Any, template: str, messages: list[Any], tools: list[Any] | None) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False))
    except Exception:  # a template is a program: it may raise anything, also on purpose
        return ""
