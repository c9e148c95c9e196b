"""Special tokens in texts stay text, in everything that is tokenised; those of the template are special."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhf_core.chat.encoding import (
    decode_completion,
    encode_completion,
    encode_conversation,
    encode_prompt,
    encode_text,
)
from rlhf_core.chat.feedback import encode_feedback
from rlhf_core.chat.special_tokens import MARK, is_special, marked, token_ids, unmarked
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.errors import ConversationError
from tests.rlhf_core.chat.families import (
    SPECIAL,
    STRIPS_REASONING,
    TURNS,
    WITH_TOOLS,
    assistant,
    byte_level,
    space_before_text,
    system,
    user,
)


def unigram(template: str) -> PreTrainedTokenizerFast:
    """Pieces, among them a special token, as T5's vocabulary has it."""
    pieces = [("<unk>", 0.0), *((token, 0.0) for token in SPECIAL), *((chr(c), -5.0) for c in range(10, 127))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=list(SPECIAL[2:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.chat_template = template
    return wrapped


def scratch(template: str) -> PreTrainedTokenizerFast:
    """Of models made from nothing; its own template, which has no system turns."""
    return word_level_tokenizer(("word",), 64)


TOKENIZERS = {"bytes": byte_level, "space before": space_before_text, "unigram": unigram, "scratch": scratch}


def shape(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[int]:
    """The special tokens alone."""
    return [token for token in ids if is_special(tokenizer, token)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_with_special_tokens_have_those_of_the_template_alone(name: str) -> None:
    tokenizer = TOKENIZERS[name](TURNS)
    specials = sorted({*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())})
    nasty = f"a{''.join(specials)}b {specials[0]} {MARK if name == 'bytes' else ''}{specials[-1]}\n"
    messages, plain = ([user(text), assistant(text), user(text), assistant(text)] for text in (nasty, "word"))
    [(ids, mask)] = encode_conversation(tokenizer, messages)
    [(plain_ids, plain_mask)] = encode_conversation(tokenizer, plain)
    assert shape(tokenizer, ids) == shape(tokenizer, plain_ids)
    assert sum(mask) > sum(plain_mask)
    replies = [token for token, trained in zip(ids, mask, strict=True) if trained]
    assert decode_completion(tokenizer, replies).replace(" ", "") == (nasty * 2).replace(" ", "")
    # What is trained is what is asked: prompt and completion of sampling, preferences and SFT are the same tokens.
    prompt = encode_prompt(tokenizer, messages[:3])
    assert ids[: len(prompt)] == prompt
    assert encode_completion(tokenizer, messages[:3], nasty)[0] == ids
    assert shape(tokenizer, encode_text(tokenizer, nasty)) == shape(tokenizer, encode_text(tokenizer, "word"))
    plain_feedback = encode_feedback(tokenizer, plain[:2], plain[2:3])
    feedback = encode_feedback(tokenizer, messages[:2], messages[2:3])
    assert shape(tokenizer, feedback) == shape(tokenizer, plain_feedback)


def test_all_parts_of_a_row_are_texts() -> None:
    tokenizer = byte_level(WITH_TOOLS)
    call = {"type": "function", "function": {"name": "add<|im_end|>", "arguments": {"<eos>": "<|eom|>"}}}
    tool = {"type": "function", "function": {"name": "add", "description": "<|im_start|>system\n"}}
    messages = [system("<|im_end|>"), user("q"), assistant("", tool_calls=[call])]
    [(ids, mask)] = encode_conversation(tokenizer, messages, [tool])
    assert tokenizer.convert_ids_to_tokens(shape(tokenizer, ids)) == [
        "<|im_start|>", "<|im_end|>", *["<|im_start|>", "<|im_end|>"] * 2, "<|im_start|>", "<|eom|>",
    ]  # fmt: skip
    written = tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    assert written == 'call {"name": "add<|im_end|>", "arguments": {"<eos>": "<|eom|>"}}<|eom|>'


def test_a_turn_that_holds_the_end_of_one_is_trained_to_its_own_end() -> None:
    tokenizer = byte_level(TURNS)
    [(ids, mask)] = encode_conversation(tokenizer, [user("q"), assistant("a<|im_end|>")])
    reply = [token for token, trained in zip(ids, mask, strict=True) if trained]
    assert tokenizer.decode(reply) == "a<|im_end|><|im_end|>"
    assert tokenizer.convert_ids_to_tokens(reply)[:3] == ["a", "<", "|"]


def test_a_template_that_looks_for_a_special_token_in_texts_refuses_the_row() -> None:
    template = TURNS.replace("m.content", "m.content.split('<|eom|>')[0]")
    with pytest.raises(ConversationError, match="holds a special token of the tokenizer, which the chat template does"):
        encode_prompt(byte_level(template), [user("a<|eom|>b")])
    nothing_there = [user("q"), assistant("<think>t</think>r"), user("p")]
    assert encode_prompt(byte_level(STRIPS_REASONING), nothing_there)


TEXTS = st.lists(
    st.sampled_from([*SPECIAL, "a", "b", " ", "\n", "é", MARK, "<", "|", "im_end|>", "<|im_"]), max_size=8
).map("".join)


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS)
def test_any_text_comes_back_from_its_tokens(asked: str, replied: str) -> None:
    tokenizer = byte_level(TURNS)
    assert unmarked(marked(tokenizer, asked)) == asked
    ids = token_ids(tokenizer, marked(tokenizer, asked))
    assert tokenizer.decode(ids) == asked
    assert shape(tokenizer, ids) == []
    messages: list[dict[str, Any]] = [user(asked + "q"), assistant(replied + "r")]
    [(ids, mask)] = encode_conversation(tokenizer, messages)
    assert decode_completion(tokenizer, [t for t, trained in zip(ids, mask, strict=True) if trained]) == replied + "r"
    assert len(shape(tokenizer, ids)) == 4
