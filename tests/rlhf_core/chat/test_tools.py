"""Tools, their calls, and `{% generation %}` tags: passed to the template, trained as written, or rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.chat.call_forms import with_call_form
from rlhf_core.chat.encoding import encode_completion, encode_conversation, encode_prompt, stop_token_ids
from rlhf_core.chat.rendering import render
from rlhf_core.errors import StageError
from rlhf_core.inference.model_server import served_model
from tests.rlhf_core.chat.families import TALK, TURNS, WITH_TOOLS, assistant, byte_level, tagged, texts, user

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = [user("q"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "3"}, assistant("three")]


def test_tools_and_calls_are_given_to_the_template_and_trained_as_written() -> None:
    tokenizer = byte_level(WITH_TOOLS)
    [text] = texts(tokenizer, CALLING, [TOOL])
    assert text == (
        '<|im_start|>system\n[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
        "<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        '⟦call {"name": "add", "arguments": {"a": 1}}<|eom|>⟧\n'
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n⟦three<|im_end|>⟧\n"
    )
    stops = {tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<|im_end|>", "<|eom|>")}
    assert set(stop_token_ids(tokenizer)) == stops
    prompt = encode_prompt(tokenizer, CALLING[:3], [TOOL])
    assert prompt == encode_conversation(tokenizer, CALLING, [TOOL])[0][0][: len(prompt)]
    assert encode_completion(tokenizer, CALLING[:3], "three", [TOOL]) == (
        encode_conversation(tokenizer, CALLING, [TOOL])[0][0],
        [False] * len(prompt) + [True] * 6 + [False],
    )


@pytest.mark.parametrize(
    ("template", "messages", "tools", "message"),
    [
        (TURNS, TALK, [TOOL], "does not write `tools`, so the model would never see them; give the base stage a chat"),
        (TURNS, CALLING, None, "does not write `tool_calls` of turn 1, so the model would never learn them"),
        (
            WITH_TOOLS,
            [user("q"), assistant("I add.", tool_calls=[CALL]), *CALLING[2:]],
            None,
            "does not write the text beside `tool_calls` of turn 1, so the model would never learn it",
        ),
        (
            WITH_TOOLS.replace("in m.tool_calls", "in m.tool_calls[:1]"),
            [user("q"), assistant("", tool_calls=[CALL, CALL]), *CALLING[2:]],
            None,
            r"does not write `tool_calls\[1\].name` of turn 1",
        ),
        (
            WITH_TOOLS.replace("call.function | tojson", "call.function.name"),
            CALLING,
            None,
            r"does not write `tool_calls\[0\].arguments` of turn 1",
        ),
        (
            WITH_TOOLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
            CALLING,
            None,
            "does not write turn 2, of role tool",
        ),
    ],
)
def test_tools_that_a_template_drops_are_refused(template: str, messages: Any, tools: Any, message: str) -> None:
    tokenizer = byte_level(template)
    with pytest.raises(StageError, match=message):
        encode_conversation(tokenizer, messages, tools)
    with pytest.raises(StageError, match=message):
        encode_prompt(tokenizer, [*messages, user("more")], tools)
    with pytest.raises(StageError, match=message):
        encode_completion(tokenizer, [*messages, user("more")], "r", tools)


WRITES_CALLS = {
    "mapping": "call.function.arguments | tojson",
    "text": "call.function.arguments",
    "either": "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
}


def joining(arguments: str, *, beside: str = "{{ m.content or '' }}") -> str:
    """WITH_TOOLS, whose calls are joined as text."""
    return WITH_TOOLS.replace(
        "{{ 'call ' + call.function | tojson }}",
        beside + "{{ 'call ' + call.function.name + '\\n' + (" + arguments + ") }}",
    )


@pytest.mark.parametrize("arguments", WRITES_CALLS.values(), ids=WRITES_CALLS)
def test_arguments_are_written_as_json_by_templates_that_take_either_form(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": [1, "&<eos>"], "b": None}}}
    messages = [CALLING[0], assistant("I add.", tool_calls=[call]), *CALLING[2:]]
    tokenizer = byte_level(joining(arguments))
    [text] = texts(tokenizer, messages, [TOOL])
    assert '⟦I add.call add\n{"a": [1, "&<eos>"], "b": null}<|eom|>⟧' in text
    prompt = encode_prompt(tokenizer, messages[:3], [TOOL])
    assert prompt == encode_conversation(tokenizer, messages, [TOOL])[0][0][: len(prompt)]
    assert tokenizer.convert_tokens_to_ids("<|eom|>") in stop_token_ids(tokenizer)


def test_a_server_of_vllm_is_given_a_template_that_writes_the_same(tmp_path: Path) -> None:
    tokenizer = byte_level(joining("call.function.arguments"))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    template = served_model("name", tmp_path, tokenizer, "float32", []).chat_template
    rendered = tokenizer.apply_chat_template(CALLING, tools=[TOOL], chat_template=template, tokenize=False)
    assert rendered == render(tokenizer, CALLING, [TOOL], generation_prompt=False)
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}  # of a request
    messages = [CALLING[0], assistant("", tool_calls=[as_text]), *CALLING[2:]]
    assert rendered == tokenizer.apply_chat_template(messages, tools=[TOOL], chat_template=template, tokenize=False)
    plain = byte_level(WITH_TOOLS)
    assert served_model("name", tmp_path, plain, "float32", []).chat_template == WITH_TOOLS


@pytest.mark.parametrize("written", ["~ call.function.arguments", "~ call.function.arguments | tojson"])
def test_arguments_are_not_written_as_python_writes_them(written: str) -> None:
    [text] = texts(byte_level(joining("''" + written)), CALLING, [TOOL])
    assert '⟦call add\n{"a": 1}<|eom|>⟧' in text


def test_a_template_that_writes_calls_as_python_does_in_either_form_is_given_mappings() -> None:
    [text] = texts(byte_level(WITH_TOOLS.replace("call.function | tojson", "call.function | string")), CALLING, [TOOL])
    assert "⟦call {'name': 'add', 'arguments': {'a': 1}}<|eom|>⟧" in text


@pytest.mark.parametrize("as_json", ["", " | tojson"])
def test_calls_are_written_by_a_template_that_takes_them_beside_no_content_alone(as_json: str) -> None:
    # As that of DeepSeek R1.
    template = WITH_TOOLS.replace("{% if m.tool_calls %}", "{% if m.role == 'assistant' and m.content is none %}")
    template = template.replace("call.function | tojson", "call['function']['arguments']" + as_json)
    [text] = texts(byte_level(template.replace("'call '", "call.function.name")), CALLING, [TOOL])
    assert '⟦add{"a": 1}<|eom|>⟧' in text


@pytest.mark.parametrize(
    "refused",
    [
        "messages[-1].tool_calls",  # without their results
        "messages | length > 2",  # with their results
        "tools is none",
        "tools is not none",
    ],
)
def test_a_template_is_asked_by_the_conversations_that_it_takes(refused: str) -> None:
    refuses = "{% if " + refused + " %}{{ raise_exception('refused') }}{% endif %}"
    tokenizer = byte_level(refuses + joining("call.function.arguments"))
    messages = CALLING[:2] if refused.endswith("> 2") else CALLING
    tools = None if refused == "tools is not none" else [TOOL]
    template = with_call_form(tokenizer, str(tokenizer.chat_template))
    text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
    assert 'call add\n{"a": 1}<|eom|>' in text


def test_a_line_end_that_a_template_begins_with_stays() -> None:
    tokenizer = byte_level("\n" + joining("call.function.arguments"))
    plain, calling = (render(tokenizer, messages, None, generation_prompt=False) for messages in (TALK, CALLING))
    assert plain.startswith("\n<|im_start|>")
    assert calling.startswith("\n<|im_start|>")


def test_tags_are_found_where_arguments_are_text() -> None:
    inside = "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments }}"
    template = tagged(inside + "{% endfor %}{{ '<|im_end|>' }}", before=HEADER, after=r"{{ '\n' }}")
    assert '⟦add{"a": 1}<|im_end|>⟧' in texts(byte_level(template), CALLING)[0]


def test_a_template_that_takes_neither_form_says_what_to_write() -> None:
    with pytest.raises(StageError, match=r"refuses a conversation: can only .* write `arguments \| tojson`"):
        encode_conversation(byte_level(joining("'' + call.function")), CALLING, [TOOL])


HEADER = r"{{ '<|im_start|>assistant\n' }}"


@pytest.mark.parametrize(
    "template",
    [
        tagged("{{ m.content + '<|im_end|>' }}", before=HEADER, after=r"{{ '\n' }}"),
        tagged(r"{{ m.content }}", before=HEADER, after=r"{{ '<|im_end|>\n' }}"),  # the end is trained all the same
        tagged(HEADER + r"{{ m.content + '<|im_end|>\n' }}"),  # the header is the prompt's all the same
    ],
    ids=["exact", "without the end", "with the header"],
)
def test_tags_that_agree_with_the_generation_prompt(template: str) -> None:
    tokenizer = byte_level(template)
    [(ids, mask)] = encode_conversation(tokenizer, TALK)
    assert [(ids, mask)] == encode_conversation(byte_level(TURNS), TALK)


def test_exact_tags_give_the_mask_that_transformers_gives() -> None:
    tokenizer = byte_level(tagged("{{ m.content + '<|im_end|>' }}", before=HEADER, after=r"{{ '\n' }}"))
    theirs = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert encode_conversation(tokenizer, TALK) == [(theirs["input_ids"], [bool(m) for m in theirs["assistant_masks"]])]


def test_tags_that_leave_out_what_the_model_must_write_are_refused() -> None:
    template = tagged(r"{{ m.content + '<|im_end|>\n' }}", before=HEADER + "{{ 'Well: ' }}")
    with pytest.raises(StageError, match=r"does not tag 'Well:' of turn 1 with \{% generation %\}"):
        encode_conversation(byte_level(template), TALK)
