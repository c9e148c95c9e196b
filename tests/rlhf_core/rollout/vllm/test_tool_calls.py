"""Calls of tools in the formats of model families, each read by vLLM's parser of that name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pytest

from rlhf_core.chat.encoding import Tokenizer
from rlhf_core.chat.templates import SHIPPED
from rlhf_core.processes.child_process import ChildProcess
from rlhf_core.rollout.tool_calls import ParsedReply, ToolCall, ToolCallParser
from rlhf_core.rollout.vllm.tool_calls import VllmCallReader
from tests.rlhf_core.chat.families import byte_level

pytestmark = [pytest.mark.parts, pytest.mark.usefixtures("forked")]

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
ARGUMENTS = '{"name": "add", "arguments": {"x": 1}}'
PARAMETERS = '{"name": "add", "parameters": {"x": 1}}'
XML = "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
FORMATS: Mapping[str, str] = {
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"x": 1}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "ernie45": f"<tool_call>\n{ARGUMENTS}\n</tool_call>\n",
    "glm45": "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "granite": f"<|tool_call|>[{ARGUMENTS}]",
    "granite-20b-fc": f"<function_call> {ARGUMENTS}",
    "granite4": f"<tool_call>{ARGUMENTS}</tool_call>",
    "hermes": f"<tool_call>{ARGUMENTS}</tool_call>",
    "hunyuan_a13b": f"<tool_calls>[{ARGUMENTS}]</tool_calls>",
    "internlm": f"<|action_start|><|plugin|>{PARAMETERS}<|action_end|>",
    "jamba": f"<tool_calls>[{ARGUMENTS}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"x": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "lfm2": "<|tool_call_start|>[add(x=1)]<|tool_call_end|>",
    "llama3_json": PARAMETERS,
    "llama4_pythonic": "[add(x=1)]",
    "longcat": f"<longcat_tool_call>{ARGUMENTS}</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="x">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS][{ARGUMENTS}]",
    "olmo3": "<function_calls>\nadd(x=1)\n</function_calls>",
    "phi4_mini_json": f"functools[{ARGUMENTS}]",
    "pythonic": "[add(x=1)]",
    "qwen3_coder": XML,
    "qwen3_xml": XML,
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">\n'
    '<steptml:parameter name="x">1</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "xlam": f"[{ARGUMENTS}]",
}
MARKS = {"<think>", "</think>", "<response>", "</response>", "<|python_tag|>"}  # that parsers look for


def tokenizer_with_marks() -> Tokenizer:
    tokenizer = byte_level(SHIPPED["chatml"].text)
    found = (re.findall(r"<[^<>\s=]+>|\[TOOL_CALLS\]", text) for text in FORMATS.values())
    tokenizer.add_tokens(sorted(MARKS.union(*found)), special_tokens=True)
    return tokenizer


def read(tokenizer: Tokenizer) -> dict[str, tuple[ParsedReply | None, ParsedReply | None]]:
    readers = {name: VllmCallReader(name, tokenizer, []) for name in FORMATS}
    return {name: (each.read(FORMATS[name], [TOOL]), each.read("text", [TOOL])) for name, each in readers.items()}


def test_the_formats_of_model_families_are_read_by_name() -> None:
    with ChildProcess("the process that parses") as process:
        found = process.call(read, tokenizer_with_marks())
    call, none = ParsedReply("", [ToolCall("add", {"x": 1})]), ParsedReply("text", [])
    assert found == dict.fromkeys(FORMATS, (call, none))


def test_malformed_calls_are_text_for_agents() -> None:
    tokenizer = tokenizer_with_marks()
    call = f"<tool_call>\n{ARGUMENTS}\n</tool_call>"
    for name, text in (("hermes", f"b{call}"), ("pythonic", "[add(x=1)]")):
        with closing(ToolCallParser(name, tokenizer, [], needs_marker=False)) as parser:
            parsed = [asyncio.run(parser.read(each, [TOOL])) for each in (text, "b", "<tool_call>{")]
        assert list(parsed[0].calls) == [ToolCall("add", {"x": 1})]
        assert parsed[1:] == [ParsedReply("b", []), ParsedReply("<tool_call>{", [])]
