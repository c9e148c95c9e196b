from __future__ import annotations

import pytest

from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.supervised.sft import conversation_examples, document_examples
from tests.rlhf_core.chat.families import STRIPS_REASONING, WITH_TOOLS, byte_level

pytestmark = pytest.mark.parts

TOKENIZER = word_level_tokenizer((), 64)


def _tokens(ids: list[int]) -> list[str]:
    return list(TOKENIZER.convert_ids_to_tokens(ids))


def test_every_assistant_turn_is_trained_and_nothing_else() -> None:
    turns = [("user", "ab"), ("assistant", "c"), ("user", "d"), ("assistant", "ef")]
    row = {"id": "r", "messages": [{"role": role, "content": content} for role, content in turns]}
    (example,) = conversation_examples(TOKENIZER, row)
    (ids,), (mask,) = example.sequences, example.masks
    assert "".join(_tokens(ids)) == "<bos><user>ab<assistant>c<eos><user>d<assistant>ef<eos>"
    assert _tokens([token for token, trained in zip(ids, mask, strict=True) if trained]) == [
        "c", "<eos>", "e", "f", "<eos>",
    ]  # fmt: skip
    assert example.num_trained_tokens == 5


def test_a_conversation_whose_earlier_turns_are_rewritten_is_an_example_a_turn() -> None:
    turns = [("user", "a"), ("assistant", "<think>t</think>b"), ("user", "c"), ("assistant", "<think>u</think>d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    examples = conversation_examples(byte_level(STRIPS_REASONING), {"id": "r", "messages": messages})
    assert [example.row_id for example in examples] == ["r", "r"]
    assert [example.num_trained_tokens for example in examples] == [18, 18]  # each reply with its reasoning and end


def test_tools_of_a_row_reach_the_template() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (plain,) = conversation_examples(byte_level(WITH_TOOLS), {"id": "r", "messages": messages})
    (example,) = conversation_examples(byte_level(WITH_TOOLS), {"id": "r", "messages": messages, "tools": [{"a": 1}]})
    assert example.num_tokens > plain.num_tokens


@pytest.mark.parametrize(
    ("max_length", "pieces"),
    [
        (12, ["<bos>abcdefg<eos>"]),
        (9, ["<bos>abcdefg<eos>"]),
        (8, ["<bos>abcdefg", "g<eos>"]),
        (5, ["<bos>abcd", "defg<eos>"]),
        (4, ["<bos>abc", "cdef", "fg<eos>"]),
    ],
)
def test_a_long_document_is_cut_without_an_eos_and_each_token_trained_once(max_length: int, pieces: list[str]) -> None:
    examples = document_examples(TOKENIZER, {"id": "r", "text": "abcdefg"}, max_length)
    assert ["".join(_tokens(example.sequences[0])) for example in examples] == pieces
    trained = [
        token
        for example in examples
        for token, said in zip(example.sequences[0], example.masks[0], strict=True)
        if said
    ]
    assert "".join(_tokens(trained)) == "abcdefg<eos>"
