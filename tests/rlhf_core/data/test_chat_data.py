"""Chat data in common forms: recognised, or rejected with one sentence; nothing is dropped silently."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_core.data.formats import RowError, canonical_row

USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
AGAIN = {"role": "user", "content": "sure?"}
BOTH = [USER, FOUR]
OTHER_PROMPT = "`chosen` and `rejected` do not answer the same prompt"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
GIVEN = {"role": "tool", "content": "4"}
SYSTEM = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, BOTH),
        ({"conversation": BOTH, "id": 7, "source": "web"}, BOTH),
        ({"messages": json.dumps(BOTH)}, BOTH),  # as CSV has it
        ({"messages": BOTH, "system": "Be short."}, [SYSTEM, *BOTH]),
        ({"messages": [SYSTEM, *BOTH], "system": "Be short."}, [SYSTEM, *BOTH]),
        ({"messages": BOTH, "system": " "}, BOTH),
        ({"prompt": [USER], "completion": [FOUR]}, BOTH),
        ({"messages": [{**SYSTEM, "role": "developer"}, USER, {**FOUR, "role": "model"}]}, [SYSTEM, *BOTH]),
        ({"messages": [FOUR, *BOTH]}, [FOUR, *BOTH]),
        ({"messages": [USER, *BOTH]}, [USER, *BOTH]),
        ({"messages": [*BOTH, USER]}, [*BOTH, USER]),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}, FOUR]},
            BOTH,
        ),
        ({"messages": [{**USER, "timestamp": 3, "refusal": None}, {**FOUR, "weight": 1}]}, BOTH),
        ({"messages": [{**USER, "weight": 0}, {**FOUR, "weight": "1.0", "loss": True}]}, BOTH),
        ({"messages": [{**USER, "from": "human", "value": "2+2?"}, {**FOUR, "thinking": ""}], "images": []}, BOTH),
        ({"messages": BOTH, "conversations": [{"from": "human", "value": "2+2?"}, FOUR]}, BOTH),
        (
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            [USER, CALLING, GIVEN, FOUR],
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
                    {"role": "function", "name": "add", "content": "4"},
                    FOUR,
                ]
            },
            [USER, CALLING, {**GIVEN, "name": "add"}, FOUR],
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": "I add.", "tool_calls": [{"id": "c1", **CALL}]},
                    {**GIVEN, "tool_call_id": "c1"},
                    {**FOUR, "reasoning": "sure"},
                ]
            },
            [
                USER,
                {"role": "assistant", "content": "I add.", "tool_calls": [{"id": "c1", **CALL}]},
                {**GIVEN, "tool_call_id": "c1"},
                {**FOUR, "reasoning_content": "sure"},
            ],
        ),
    ],
)
def test_conversations(row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert canonical_row(row, "conversations", {})["messages"] == messages


@pytest.mark.parametrize(
    ("data_format", "row", "tools"),
    [
        ("conversations", {"messages": BOTH, "functions": [{"name": "add"}]}, ["add"]),
        ("conversations", {"messages": BOTH, "tools": "[]", "functions": '[{"name": "add"}]'}, ["add"]),
        ("conversations", {"messages": BOTH, "tools": "[]"}, None),
        ("prompts", {"prompt": "2+2?", "tools": "[]", "functions": "sin"}, None),
    ],
)
def test_tools_as_others_write_them(data_format: str, row: dict[str, Any], tools: list[str] | None) -> None:
    made = canonical_row(row, data_format, {})
    assert made.get("tools") == (
        None if tools is None else [{"type": "function", "function": {"name": name}} for name in tools]
    )
    assert made.get("functions") == (row["functions"] if data_format == "prompts" else None)


@pytest.mark.parametrize(
    ("data_format", "row", "expected"),
    [
        ("prompts", {"messages": [SYSTEM, USER], "answer": 4}, {"prompt": [SYSTEM, USER], "answer": "4"}),
        ("prompts", {"system": "Be short.", "question": "2+2?"}, {"prompt": [SYSTEM, USER]}),
        ("prompts", {"prompt": [FOUR, USER]}, {"prompt": [FOUR, USER]}),
        (
            "preferences",
            {
                "conversations": [{"from": "human", "value": "2+2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
                "system": "Be short.",
            },
            {"prompt": [SYSTEM, USER], "chosen": "4", "rejected": "5"},
        ),
        (
            "preferences",
            {"chosen": BOTH, "rejected": [USER, {**FOUR, "content": "5"}], "messages": BOTH},
            {"prompt": [USER], "chosen": "4", "rejected": "5"},
        ),
        (  # two whole conversations part before their last turns
            "preferences",
            {"chosen": [USER, FOUR, AGAIN, FOUR], "rejected": [USER, FIVE, USER, FOUR]},
            {"prompt": [USER], "chosen": [FOUR, AGAIN, FOUR], "rejected": [FIVE, USER, FOUR]},
        ),
        (  # one has fewer turns; the prompt beside them
            "preferences",
            {"prompt": "2+2?", "chosen": [FOUR], "rejected": [FIVE, AGAIN, FOUR]},
            {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE, AGAIN, FOUR]},
        ),
        (  # they part at their last turn
            "preferences",
            {"prompt": "2+2?", "chosen": [FIVE, AGAIN, FOUR], "rejected": [FIVE, AGAIN, FIVE]},
            {"prompt": [USER, FIVE, AGAIN], "chosen": "4", "rejected": "5"},
        ),
    ],
)
def test_prompts_and_preferences(data_format: str, row: dict[str, Any], expected: dict[str, Any]) -> None:
    made = canonical_row(row, data_format, {})
    assert {name: value for name, value in made.items() if name != "id"} == expected


NESTED: Any = "x"
for _ in range(300):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("data_format", "row", "sentence"),
    [
        (
            "conversations",
            {"messages": []},
            "`messages` has no messages; it must be a list of messages {role, content}",
        ),
        ("conversations", {"messages": {}}, "`messages` is dict; it must be a list of messages {role, content}"),
        (
            "conversations",
            {"messages": "[{'role': 'user'}]"},
            "`messages` must be a list of messages, this is text: not JSON",
        ),
        (
            "conversations",
            {"messages": [FOUR, USER]},
            "`messages` has no assistant turn but the first message, which answers nothing",
        ),
        (
            "conversations",
            {"messages": [{**USER, "role": "narrator"}, FOUR]},
            "`messages[0]` has the role 'narrator'; roles are system",
        ),
        (
            "conversations",
            {"messages": [{**USER, "role": ["user"]}, FOUR]},
            "`messages[0]` has the role \"['user']\"; roles are",
        ),
        ("conversations", {"messages": [{"content": "x"}, FOUR]}, "`messages[0]` has no `role`; it must be"),
        (
            "conversations",
            {"messages": [{**USER, "from": "gpt"}, FOUR]},
            "`messages[0]` differs in `role` and `from`",
        ),
        (
            "conversations",
            {"messages": [{**USER, "value": "3+3?"}, FOUR]},
            "`messages[0]` differs in `content` and `value`",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "reasoning": "a", "thinking": "b"}]},
            "`messages[1]` differs in `reasoning` and `thinking`",
        ),
        (
            "conversations",
            {"messages": [USER, {**CALLING, "function_call": CALL["function"]}]},
            "`messages[1]` has both `tool_calls` and `function_call`",
        ),
        (
            "conversations",
            {"messages": BOTH, "conversations": [USER, {**FOUR, "content": "5"}]},
            "`messages` and `conversations` are two conversations: remove one",
        ),
        (
            "conversations",
            {"messages": BOTH, "prompt": "x", "completion": "y"},
            "`messages` and `prompt` with `completion` are two conversations: remove one",
        ),
        (
            "conversations",
            {"messages": [USER, {**CALLING, "tool_calls": [{"function": {"name": " "}}]}]},
            "`messages[1].tool_calls` [0] has no function name",
        ),
        ("conversations", {"messages": [USER, {**FOUR, "content": "\u200b\ufeff "}]}, "`messages[1]` has no text in"),
        (
            "conversations",
            {"messages": [{**USER, "content": [{"type": "text", "text": None}]}, FOUR]},
            "`messages[0].content` has a part of the type 'text' whose `text` is not text",
        ),
        (
            "conversations",
            {"messages": BOTH, "images": ["a.png"]},
            "`images` accompanies the text, but rows hold only text",
        ),
        ("conversations", {"messages": [{**USER, "audio": {"id": 1}}, FOUR]}, "`messages[0].audio` accompanies the"),
        ("prompts", {"prompt": "x", "image": b"PNG"}, "`image` accompanies the text, but rows hold only text"),
        ("conversations", {"messages": None, "id": 1}, "`messages` is null"),
        ("conversations", {"instruction": "x"}, "no column `messages`, and no `prompt` with `completion`; it has"),
        ("conversations", {"prompt": "x", "response": "y"}, "no column `completion`; it has response (see"),
        ("text", {"text": "\u200b"}, "`text` is empty"),
        ("conversations", {"messages": [USER, {**FOUR, "content": None}]}, "`messages[1]` has no text in `content`"),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "content": {"text": "4"}}]},
            "`messages[1]` has no text in `content`, but dict",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "content": 4}]},
            "`messages[1]` has no text in `content`, but int",
        ),
        (
            "conversations",
            {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, FOUR]},
            "`messages[0].content` has a part of the type 'image_url': rows hold only text, and in",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "weight": 0}]},
            "`messages[1].weight` is 0, but every assistant turn is trained",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "weight": 0.5}]},
            "`messages[1].weight` is 0.5, but every assistant turn is trained, all alike",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "loss": "false"}]},
            "`messages[1].loss` is false, but every assistant turn is trained",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "tool_calls": [3]}]},
            "`messages[1].tool_calls` [0] must be {type",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "tool_calls": [{"name": "add", "parameters": {"a": 2}}]}]},
            "`messages[1].tool_calls` [0] has its arguments in `parameters`: call that `arguments`",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "tool_calls": [{"id": "c1", **CALL}]}, {**GIVEN, "tool_call_id": "c2"}, FOUR]},
            "`messages[2]` answers the call 'c2', which no turn before it makes: correct `tool_call_id`",
        ),
        (
            "conversations",
            {"messages": [USER, {**GIVEN, "tool_call_id": "c1"}, {**FOUR, "tool_calls": [{"id": "c1", **CALL}]}]},
            "`messages[1]` answers the call 'c1', which no turn before it makes: correct `tool_call_id`",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "mask": 1}]},
            "`messages[1].mask` is 1, but every assistant turn",
        ),
        (
            "conversations",
            {"messages": BOTH, "tools": [{"name": "add"}], "functions": [{"name": "add"}]},
            "the row has both `tools` and `functions`: remove one, such as by `columns`",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "tool_calls": "no"}]},
            "`messages[1].tool_calls` is text that is not valid JSON",
        ),
        (
            "conversations",
            {"messages": [{**GIVEN, "tool_calls": [CALL]}, FOUR]},
            "`messages[0]` has `tool_calls`, but only assistant",
        ),
        (
            "conversations",
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "add(2)"}]},
            "`conversations[1].tool_calls` is text that is not valid JSON",
        ),
        (
            "conversations",
            {"messages": [SYSTEM, *BOTH], "system": "Be long."},
            "the column `system` differs from the first message",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "content": "a\0b"}]},
            "`messages.1.content` holds a NUL character",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "content": "\ud800"}]},
            "`messages.1.content` is not valid Unicode",
        ),
        ("prompts", {"prompt": 3}, "`prompt` must be text or a list of messages, this is int"),
        ("prompts", {"prompt": "x", "\ud800": 1}, "`\\ud800` is not valid Unicode: it holds half a surrogate pair"),
        ("prompts", {"prompt": "x", None: 1}, "a column is called None, which is not text"),
        ("prompts", {"prompt": "x", "m": {1: 2, "a": object()}}, "`m` has a key that is int, not text"),
        ("prompts", {"prompt": "x", "m": NESTED}, "`m` has more than 100 lists and mappings inside each other"),
        ("prompts", {"prompt": "x", "m": b"x"}, "`m` is bytes, which JSON cannot hold: write it as text or a number"),
        ("prompts", {"prompt": "x", "answer": float("inf")}, "`answer` must be text, this is inf"),
        (
            "preferences",
            {"prompt": "x", "chosen": "a", "rejected": "b", "margin": 10**400},
            "`margin` must be a number",
        ),
        ("preferences", {"prompt": "x", "chosen": "a", "rejected": "b", "margin": "nan"}, "`margin` must be a number"),
        ("preferences", {"prompt": "x", "chosen": "a", "rejected": "b", "margin": True}, "`margin` must be a number"),
        (
            "preferences",
            {"chosen": [USER, FOUR, AGAIN, FOUR], "rejected": [AGAIN, FOUR]},
            OTHER_PROMPT,
        ),
        (
            "preferences",
            {"chosen": [USER, FOUR, AGAIN, FOUR], "rejected": [USER, FOUR, USER, FOUR]},
            OTHER_PROMPT,
        ),
        (
            "preferences",
            {"chosen": [USER, FOUR, AGAIN, FOUR], "rejected": [USER, FOUR]},
            OTHER_PROMPT,
        ),
        ("preferences", {"chosen": BOTH, "rejected": BOTH}, "`chosen` and `rejected` are the same"),
        (
            "preferences",
            {"prompt": "3+3?", "chosen": [USER, FOUR, AGAIN, FOUR], "rejected": [USER, FIVE]},
            "`prompt` differs from the prompt in `chosen` and `rejected`",
        ),
        ("preferences", {"prompt": "x", "chosen": "a", "rejected": " "}, "`rejected` is empty"),
        (
            "preferences",
            {"prompt": "x", "chosen": 3, "rejected": "b"},
            "`chosen` must be text or messages, this is int",
        ),
        ("preferences", {"prompt": "x", "chosen": "a", "rejected": "a\n"}, "`chosen` and `rejected` are the same"),
        ("preferences", {"prompt": "x", "chosen": None, "rejected": "b"}, "`chosen` is null"),
    ],
)
def test_what_is_no_chat_is_one_sentence(data_format: str, row: dict[Any, Any], sentence: str) -> None:
    with pytest.raises(RowError) as raised:
        canonical_row(row, data_format, {})
    assert str(raised.value).startswith(sentence), raised.value


def test_a_sentence_is_one_line_that_can_be_printed() -> None:
    with pytest.raises(RowError) as raised:
        canonical_row({"a\nb\x1b[31m\ud800" * 500: 1}, "text", {})
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1100
