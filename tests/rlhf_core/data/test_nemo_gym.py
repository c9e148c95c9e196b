"""Rows of NeMo Gym become prompts."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.data.formats import RowError, canonical_row

USER = {"role": "user", "content": "a?"}


def canonical(request: Any, **others: Any) -> dict[str, Any]:
    source = {"responses_create_params": request, **others}
    return canonical_row(source, "prompts", {"nemo_gym": "responses_create_params"})


def test_the_request_is_the_prompt_and_the_row_is_kept_whole() -> None:
    request = {"input": "a?", "instructions": "Be brief.", "temperature": 0.5}
    row = canonical(request, id=3, prompt="other", tools="hammer", messages=[], images=["x.png"])
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, USER]
    assert row["nemo_gym"] == {
        "responses_create_params": request, "id": 3, "prompt": "other", "tools": "hammer", "messages": [],
        "images": ["x.png"],
    }  # fmt: skip
    assert row.keys() == {"id", "prompt", "nemo_gym"}


def test_tools_and_the_items_of_earlier_turns() -> None:
    add = {"name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {**USER, "type": "message"},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "0"},
        {"role": "assistant", "content": "c"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "again"}]},
        {"role": "assistant", "content": "d"},
        USER,
    ]
    row = canonical({"input": items, "tools": [{"type": "function", **add}]})
    function = {"type": "function", "function": add}
    assert row["tools"] == [function]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {}}},
    ]
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "0", "tool_call_id": "c2"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "again"},
        USER,
    ]


def test_a_row_that_is_not_said_to_be_one_is_a_bad_row() -> None:
    with pytest.raises(RowError, match=r"row of NeMo Gym: say so by `columns: {nemo_gym: responses_create_params}`"):
        canonical_row({"responses_create_params": {"input": "a?"}}, "prompts", {})
    named = canonical_row({"responses_create_params": {}, "prompt": "a?"}, "prompts", {})
    assert named["prompt"] == [USER]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ("a?", "`nemo_gym` must be `responses_create_params` of a row of NeMo Gym, this is str"),
        ({}, "`responses_create_params.input` must be text or a list of items, this is NoneType"),
        ({"input": []}, "`responses_create_params.input` must be text or a list of items, this is list"),
        ({"input": ["a"]}, r"`responses_create_params.input\[0\]` is str; it must be a message, a reasoning,"),
        ({"input": [{"type": "computer_call"}]}, r"is of the type 'computer_call'; it must be a message"),
        ({"input": [USER, {"role": "assistant", "content": "b"}]}, "ends with an assistant turn"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            r"`responses_create_params.input\[0\].content` has a part of the type 'input_image'",
        ),
        ({"input": "a", "tools": [{"type": "web_search"}]}, r"`tools` \[0\] is of type 'web_search'"),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]},
            r"`responses_create_params.input\[1\]` has no text in `content`, but dict",
        ),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_a_bad_row(request_: Any, problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        canonical(request_)
