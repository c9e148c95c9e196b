from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_core.chat.tool_schemas import ToolError, canonical_tool_calls, canonical_tools

ADD = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "tools", [[{"type": "function", "function": ADD}], [{"function": ADD}], [ADD], json.dumps([ADD])], ids=str
)
def test_tools_have_one_form(tools: Any) -> None:
    assert canonical_tools(tools) == [{"type": "function", "function": ADD}]


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
        [{"name": "add", "arguments": {"a": 1}}],
        json.dumps([CALL]),
    ],
    ids=str,
)
def test_calls_have_one_form(calls: Any) -> None:
    assert canonical_tool_calls(calls) == [CALL]


def test_a_call_keeps_its_id_and_may_have_no_arguments() -> None:
    assert canonical_tool_calls([{"id": "c1", "function": {"name": "now"}}]) == [
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([], "must be a list of"),
        ({"name": "add"}, "must be a list of"),
        ("[", "is text that is not valid JSON"),
        (["add"], r"\[0\] must be .*, this is str"),
        ([CALL, {"function": {}}], r"\[1\] has no function name"),
        ([{"type": "retrieval", "name": "add"}], r"\[0\] is of type 'retrieval'; only functions can be called"),
        ([{"name": "add", "arguments": "a=1"}], r"\[0\]: the arguments are text that is not valid JSON"),
        ([{"name": "add", "arguments": "[1]"}], r"\[0\]: the arguments must be a mapping, this is list"),
    ],
)
def test_what_is_no_call_says_what_it_is(calls: Any, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        canonical_tool_calls(calls)
