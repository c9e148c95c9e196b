from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf_core.chat.encoding import (
    decode_completion,
    encode_completion,
    encode_conversation,
    encode_prompt,
    encode_text,
    load_tokenizer,
    stop_token_ids,
)
from rlhf_core.chat.tokenizers import CHARACTERS, word_level_tokenizer
from rlhf_core.errors import StageError

WORDS = ("Spell", "Spell this", " the ", "[x]*", "a")
QUESTION = [{"role": "user", "content": "Spell this: ab"}]
TALK = [*QUESTION, {"role": "assistant", "content": "b a"}, *QUESTION, {"role": "assistant", "content": "ba"}]

CHATML = (
    "{% for m in messages %}{{ '<user>' + m.role + '\n' + m.content + '<assistant>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<user>assistant\n' }}{% endif %}"
)


def tokens(ids: list[int]) -> list[str]:
    return [str(token) for token in word_level_tokenizer(WORDS, 64).convert_ids_to_tokens(ids)]


def test_vocabulary_and_longest_match() -> None:
    tokenizer = word_level_tokenizer(WORDS, 64)
    assert len(tokenizer) == 6 + len(CHARACTERS) + 4  # `a` is a character already
    assert tokens(tokenizer("Spell this the [x]* Spells\n")["input_ids"]) == [
        "<bos>", "Spell this", " the ", "[x]*", " ", "Spell", "s", "\n",
    ]  # fmt: skip
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize(
    "text", ["  two  spaces ", "a .b , c ' s n't", "\n\n x \n", "".join(CHARACTERS), "Spell thisthe the the"]
)
def test_decoding_gives_the_text_back(tmp_path: Path, text: str) -> None:
    word_level_tokenizer(WORDS, 64).save_pretrained(tmp_path)
    for tokenizer in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert decode_completion(tokenizer, encode_text(tokenizer, text)) == text


def test_unknown_characters_are_unk() -> None:
    assert tokens(encode_text(word_level_tokenizer(WORDS, 64), "é!")) == ["<bos>", "<unk>", "!", "<eos>"]


def test_text_has_one_bos_and_one_eos() -> None:
    tokenizer = word_level_tokenizer(WORDS, 64)
    expected = ["<bos>", "x", "<eos>"]
    assert tokens(encode_text(tokenizer, "x")) == expected
    assert tokens(encode_text(tokenizer, "<bos>x<eos>")) == ["<bos>", *"<bos>x<eos>", "<eos>"]


def test_conversation_form_and_mask() -> None:
    tokenizer = word_level_tokenizer(WORDS, 64)
    [(ids, mask)] = encode_conversation(tokenizer, TALK)
    turn = ["<user>", "Spell this", ":", " ", "a", "b", "<assistant>"]
    assert tokens(ids) == ["<bos>", *turn, "b", " ", "a", "<eos>", *turn, "b", "a", "<eos>"]
    assert [token for token, said in zip(tokens(ids), mask, strict=True) if said] == [
        "b", " ", "a", "<eos>", "b", "a", "<eos>",
    ]  # fmt: skip
    assert tokens(encode_prompt(tokenizer, QUESTION)) == ["<bos>", *turn]
    assert stop_token_ids(tokenizer) == (tokenizer.eos_token_id,)


def test_a_prompt_is_a_prefix_of_its_conversation() -> None:
    tokenizer = word_level_tokenizer(WORDS, 64)
    prompt = encode_prompt(tokenizer, TALK[:3])
    ids, mask = encode_completion(tokenizer, TALK[:3], "ba")
    assert ids == encode_conversation(tokenizer, TALK)[0][0]
    assert ids[: len(prompt)] == prompt
    assert mask == [False] * len(prompt) + [True] * 3


def test_the_token_that_ends_a_turn_is_trained_and_what_follows_is_not() -> None:
    tokenizer = word_level_tokenizer(WORDS, 64)
    tokenizer.chat_template = CHATML  # ends turns with another token than EOS, and a newline
    [(ids, mask)] = encode_conversation(tokenizer, TALK[:2])
    assert [token for token, said in zip(tokens(ids), mask, strict=True) if said] == ["b", " ", "a", "<assistant>"]
    assert tokens(ids)[-2:] == ["<assistant>", "\n"]
    assert set(stop_token_ids(tokenizer)) == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<assistant>")}


def test_eos_is_added_where_the_template_ends_no_turn() -> None:
    tokenizer = word_level_tokenizer(WORDS, 64)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    [(ids, mask)] = encode_conversation(tokenizer, TALK[:2])
    assert (tokens(ids)[-1], mask[-1]) == ("<eos>", True)


def test_templates_that_cannot_be_used_say_so(tmp_path: Path) -> None:
    tokenizer = word_level_tokenizer(WORDS, 64)
    with pytest.raises(StageError, match="user and assistant turns only, not system"):
        encode_prompt(tokenizer, [{"role": "system", "content": "x"}, *QUESTION])
    tokenizer.chat_template = None
    with pytest.raises(StageError, match=r"no chat template.*set the base stage's chat_template.*or.*input_template"):
        encode_prompt(tokenizer, QUESTION)
    with pytest.raises(StageError, match=r"there is no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("flag", ["split_special_tokens", "single_word"])
def test_a_tokenizer_that_reads_its_special_tokens_as_text_is_refused(tmp_path: Path, flag: str) -> None:
    word_level_tokenizer(WORDS, 64).save_pretrained(tmp_path)
    load_tokenizer(tmp_path)
    name = "tokenizer_config.json" if flag == "split_special_tokens" else "tokenizer.json"
    content = json.loads((tmp_path / name).read_text())
    for part in [content] if flag == "split_special_tokens" else content["added_tokens"]:
        part[flag] = True
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(StageError, match="reads its own end-of-text token, <eos>, as text"):
        load_tokenizer(tmp_path)
