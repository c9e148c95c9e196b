from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import pytest

from rlhf_core.data.formats import RowError, canonical_row, format_of, row_id

USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


class Question(str, Enum):  # noqa: UP042 (whose str() is its name)
    SUM = "2+2?"


def canonical(row: dict[str, Any], data_format: str, **columns: str) -> dict[str, Any]:
    made = canonical_row(row, data_format, columns)
    assert made.pop("id") == row_id(made)
    return made


@pytest.mark.parametrize(
    ("data_format", "source", "expected"),
    [
        ("text", {"text": "a b", "other": 1}, {"text": "a b"}),
        ("conversations", {"messages": [USER, FOUR]}, {"messages": [USER, FOUR]}),
        ("conversations", {"prompt": "2+2?", "completion": "4"}, {"messages": [USER, FOUR]}),
        ("conversations", {"question": "2+2?", "answer": 4}, {"messages": [USER, FOUR]}),
        (
            "conversations",
            {"messages": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            {"messages": [USER, FOUR]},
        ),
        (
            "preferences",
            {"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": "0.5"},
            {"prompt": [USER], "chosen": "4", "rejected": "5", "margin": 0.5},
        ),
        (
            "preferences",
            {"chosen": [USER, FOUR], "rejected": [USER, {"role": "assistant", "content": "5"}]},
            {"prompt": [USER], "chosen": "4", "rejected": "5"},
        ),
        (
            "preferences",
            {"prompt": [USER], "chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}},
            {"prompt": [USER], "chosen": "4", "rejected": "5"},
        ),
        (
            "unpaired",
            {"prompt": "2+2?", "completion": "4", "label": True, "score": 3},
            {"prompt": [USER], "completion": "4", "label": True},
        ),
        ("unpaired", {"completion": [USER, FOUR], "label": 0}, {"prompt": [USER], "completion": "4", "label": False}),
        (
            "unpaired",
            {"prompt": [USER], "completion": [FOUR], "label": " True"},
            {"prompt": [USER], "completion": "4", "label": True},
        ),
        (
            "stepwise",
            {"prompt": "2+2?", "steps": ["2", "4"], "labels": [True, 0.25], "rating": 1},
            {"prompt": [USER], "steps": ["2", "4"], "labels": [1.0, 0.25]},
        ),
        (
            "stepwise",
            {"prompt": "2+2?", "steps": ["5", "4"], "labels": [False, None]},
            {"prompt": [USER], "steps": ["5", "4"], "labels": [0.0, None]},
        ),
        (
            "stepwise",
            {
                "input": "2+2? Step 1: 1+1 = <<1+1=2>>2. ки\nStep 2: 2 - -2 = 4. ки\nStep 3: So it is: 5 ки",
                "label": "2+2? Step 1: 1+1 = <<1+1=2>>2. +\nStep 2: 2 - -2 = 4. +\nStep 3: So it is: 5 -",
                "task": "GSM8K",
            },
            {
                "prompt": [USER],
                "steps": ["Step 1: 1+1 = <<1+1=2>>2.", "Step 2: 2 - -2 = 4.", "Step 3: So it is: 5"],
                "labels": [1.0, 1.0, 0.0],
            },
        ),
        (
            "completions",
            {"prompt": "2+2?", "completion": "4", "reward": "3", "verbosity": 2},
            {"prompt": [USER], "completions": [{"text": "4", "reward": 3.0}]},
        ),
        ("completions", {"prompt": "2+2?", "completion": "4"}, {"prompt": [USER], "completions": [{"text": "4"}]}),
        (
            "prompts",
            {"question": "2+2?", "answer": 4, "task": "sums", "metadata": {"a": [1]}, "level": 3},
            {"prompt": [USER], "answer": "4", "task": "sums", "metadata": {"a": [1]}, "level": 3},
        ),
        ("prompts", {"prompt": [USER], "answer": None}, {"prompt": [USER]}),
        (  # what is null or empty counts as absent, as data frames write it
            "conversations",
            {
                "messages": [
                    {**USER, "tool_calls": None, "name": None},
                    {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": '{"a": 2}'}]},
                    {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c", "tool_calls": []},
                    {**FOUR, "reasoning_content": "so"},
                ],
                "tools": '[{"name": "add"}]',
            },
            {
                "messages": [
                    USER,
                    CALLING,
                    {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c"},
                    {**FOUR, "reasoning_content": "so"},
                ],
                "tools": [TOOL],
            },
        ),
        (
            "preferences",
            {"prompt": "2+2?", "chosen": "4", "rejected": "5", "tools": [TOOL["function"]]},
            {"prompt": [USER], "chosen": "4", "rejected": "5", "tools": [TOOL]},
        ),
        (
            "prompts",
            {"prompt": [USER, CALLING, {"role": "tool", "content": "4"}], "tools": [TOOL["function"]]},
            {"prompt": [USER, CALLING, {"role": "tool", "content": "4"}], "tools": [TOOL]},
        ),
        ("conversations", {"messages": [USER, FOUR], "tools": []}, {"messages": [USER, FOUR]}),
        (
            "unpaired",
            {"prompt": Question.SUM, "completion": "4", "label": np.bool_(True)},
            {"prompt": [USER], "completion": "4", "label": True},
        ),
    ],
)
def test_every_accepted_shape_becomes_the_canonical_one(
    data_format: str, source: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert canonical(source, data_format) == expected


def test_columns_read_fields_of_a_column() -> None:
    row = {"prompt": "p", "reward_model": {"style": "rule", "ground_truth": {"value": "4"}}, "a.b": "x", "a": {"b": 1}}
    made = canonical(row, "prompts", answer="reward_model.ground_truth.value", task="a.b")
    assert (made["answer"], made["task"], made["reward_model"]["style"]) == ("4", "x", "rule")
    with pytest.raises(RowError, match=r"no column `reward_model\.truth` \(did you mean `reward_model`\?\); it has a"):
        canonical_row(row, "prompts", {"answer": "reward_model.truth"})


def test_columns_rename_the_source() -> None:
    row = canonical({"instruction": "2+2?", "output": "4"}, "conversations", prompt="instruction", completion="output")
    assert row == {"messages": [USER, FOUR]}


def test_a_column_called_unused_is_left_out() -> None:
    row = canonical({"prompt": "2+2?", "image": b"PNG", "level": 3}, "prompts", unused="image")
    assert row == {"prompt": [USER], "level": 3}


@pytest.mark.parametrize(
    ("data_format", "source", "columns", "message"),
    [
        (
            "prompts",
            {"promt": "a", "answer": "b"},
            {},
            "no column `prompt` (did you mean `promt`?); it has answer, promt (see `columns` in the recipe)",
        ),
        ("text", {"txt": "a"}, {}, "no column `text` (did you mean `txt`?)"),
        ("conversations", {"prompt ": "a", "completion": "b"}, {}, "it has completion, `prompt ` (see"),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1_0"}, {}, "must be a number"),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "٣"}, {}, "must be a number"),
        ("text", {"text": " \n"}, {}, "`text` is empty"),
        ("text", {"text": ["a"]}, {}, "`text` must be text, this is list"),
        ("prompts", {"a": "b"}, {"prompt": "q"}, "no column `q`; it has a"),
        ("conversations", {"messages": [USER]}, {}, "`messages` has no assistant turn"),
        ("conversations", {"messages": "hello"}, {}, "`messages` must be a list of messages"),
        ("conversations", {"messages": [{"role": "bot", "content": "x"}]}, {}, "`messages[0]` has the role 'bot'"),
        ("conversations", {"messages": [{"role": "user", "content": ""}]}, {}, "`messages[0]` has no text"),
        ("preferences", {"prompt": "a", "chosen": "b"}, {}, "no column `rejected`"),
        (
            "preferences",
            {"chosen": "Human: a", "rejected": "Human: b"},
            {},
            "no column `prompt`, and `chosen` is not a list of messages that begins with it; it has chosen, rejected",
        ),
        *(
            ("stepwise", {"input": before, "label": after}, {}, message)
            for before, after, message in [
                ("q Step 1: a ки", "q Step 1: a ?", "`label` must be `input` with `+` or `-` in place of each tag"),
                ("q Step 1: a ки b", "q Step 1: c + b", "`label` must be `input` with `+` or `-`"),
                ("q Step 1: a ки", "q Step 1: a ки", "`label` must be `input` with `+` or `-`"),
                ("q a ки", "q a +", "`input` must be a question, `Step 1:`, and further steps"),
                ("q Step 1: a ки b", "q Step 1: a + b", "and further steps, each with a tag after it"),
                ("q", 1, "`input` and `label` must be text"),
            ]
        ),
        *(
            ("stepwise", {"prompt": "a", "steps": ["b", "c"], "labels": [1, 0], **row}, {}, message)
            for row, message in [
                ({"labels": [True]}, "there are 2 `steps` and 1 `labels`: each step needs one"),
                ({"labels": [1, 2]}, "`labels[1]` must be true, false or from 0 to 1, this is 2"),
                ({"labels": [0, -1]}, "`labels[1]` must be true, false or from 0 to 1, this is -1"),
                ({"labels": ["good", 1]}, "`labels[0]` must be a number, this is 'good'"),
                ({"labels": [None, None]}, "`labels` are all null: no step was judged"),
                ({"labels": "1,0"}, "`labels` must be a list with one entry a step, this is str"),
                ({"steps": ["b", " "]}, "`steps[1]` is empty"),
                ({"steps": ["b", 4]}, "`steps[1]` must be text, this is int"),
                ({"steps": []}, "`steps` must be a list with one entry a step, this has none"),
                ({"steps": None}, "`steps` is null"),
            ]
        ),
        ("completions", {"prompt": "a"}, {}, "no column `completions` or `completion`"),
        ("completions", {"prompt": "a", "completions": ["b"], "completion": "b"}, {}, "there are both `completions`"),
        ("unpaired", {"prompt": "a", "completion": "b"}, {}, "no column `label`"),
        ("unpaired", {"prompt": "a", "label": True}, {}, "no column `completion`"),
        ("unpaired", {"prompt": "a", "completion": " ", "label": True}, {}, "`completion` is empty"),
        ("unpaired", {"prompt": "a", "completion": "b", "label": "good"}, {}, "must be true or false, this is 'good'"),
        ("unpaired", {"prompt": "a", "completion": "b", "label": 0.5}, {}, "must be true or false, this is 0.5"),
        ("unpaired", {"prompt": "a", "completion": "b", "label": [1]}, {}, "must be true or false, this is [1]"),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "b"}, {}, "`chosen` and `rejected` are the same"),
        (
            "preferences",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"},
            {},
            "`margin` must be a number",
        ),
        (
            "preferences",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -2e6},
            {},
            "`margin` is -2e+06, and no reward is larger than 1,000,000: scale rewards down",
        ),
        ("completions", {"prompt": "a", "completion": "b", "reward": 1e30}, {}, "`reward` is 1e+30, and no reward is"),
        (
            "completions",
            {"prompt": "a", "completions": [{"text": "b", "rewards": {"own": 1e7}}]},
            {},
            "`completions[0].rewards.own` is 1e+07, and no reward is larger",
        ),
        (
            "conversations",
            {"messages": [USER, {"role": "assistant", "content": None}]},
            {},
            "`messages[1]` has no text",
        ),
        ("conversations", {"messages": [{**USER, "tool_calls": [CALL]}]}, {}, "has `tool_calls`, but only assistant"),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "tool_calls": [{"name": "add", "arguments": "a"}]}]},
            {},
            "`messages[1].tool_calls` [0]: the arguments are text that is not valid JSON",
        ),
        (
            "conversations",
            {"messages": [USER, FOUR], "tools": [3]},
            {},
            "`tools` [0] must be {type: function, function",
        ),
        (
            "conversations",
            {"messages": [USER, {**FOUR, "name": 3}]},
            {},
            "`messages[1].name` must be text, this is int",
        ),
        (
            "preferences",
            {"chosen": [USER, CALLING], "rejected": [USER, FOUR]},
            {},
            "`chosen` ends with tool calls or reasoning_content; a preference compares texts alone",
        ),
        ("prompts", {"prompt": [USER, FOUR]}, {}, "`prompt` ends with an assistant turn"),
        ("prompts", {"prompt": "a", "answer": True}, {}, "`answer` must be text, this is bool"),
        (
            "prompts",
            {"prompt": "a", "when": object()},
            {},
            "`when` is object, which JSON cannot hold: write it as text or a number",
        ),
        ("prompts", {"prompt": "a", "level": float("nan")}, {}, "`level` is NaN or infinite"),
    ],
)
def test_a_wrong_row_says_what_is_wrong(
    data_format: str, source: dict[str, Any], columns: dict[str, str], message: str
) -> None:
    with pytest.raises(RowError) as raised:
        canonical_row(source, data_format, columns)
    assert message in str(raised.value)


def test_ids_depend_on_content_alone() -> None:
    first = canonical_row({"prompt": "a", "answer": "b"}, "prompts", {})
    assert first["id"] == canonical_row({"answer": "b", "question": "a", "id": 7}, "prompts", {})["id"]
    assert first["id"] != canonical_row({"prompt": "a", "answer": "c"}, "prompts", {})["id"]
    assert len(first["id"]) == 16


def test_prompts_are_duplicates_by_what_judges_read_other_rows_by_content() -> None:
    a = canonical_row({"prompt": "x  y", "metadata": {"index": 1}}, "prompts", {})
    b = canonical_row({"prompt": "x y", "metadata": {"index": 2}}, "prompts", {})
    assert format_of("prompts").duplicate_key(a) == format_of("prompts").duplicate_key(b)
    c = canonical_row({"prompt": "x y", "tools": [TOOL]}, "prompts", {})
    assert format_of("prompts").duplicate_key(a) != format_of("prompts").duplicate_key(c)
    for other in ({"answer": "1"}, {"answer": "2"}, {"environment": "game"}):
        d = canonical_row({"prompt": "x y", **other}, "prompts", {})
        assert format_of("prompts").duplicate_key(a) != format_of("prompts").duplicate_key(d)
        e = canonical_row({"prompt": "x  y", **other, "metadata": {"index": 3}}, "prompts", {})
        assert format_of("prompts").duplicate_key(e) == format_of("prompts").duplicate_key(d)
    a = canonical_row({"prompt": "x", "chosen": "1", "rejected": "2"}, "preferences", {})
    b = canonical_row({"prompt": "x", "chosen": "1", "rejected": "3"}, "preferences", {})
    assert format_of("preferences").duplicate_key(a) != format_of("preferences").duplicate_key(b)
