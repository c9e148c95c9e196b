"""Steps of a completion end at sampled tokens, also where characters and separators share tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.chat.encoding import written_text
from rlhf_core.chat.steps import step_ends, step_texts, step_tokens
from rlhf_core.chat.tokenizers import word_level_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = word_level_tokenizer(["one", "two", ".\n", "a\nb\nc"], context_length=64)
EOS = WORDS.eos_token_id


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, but for a newline with what begins a three-byte character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline, lead = "Ċ", "â"  # how byte-level vocabularies write the bytes 0A and E2
    vocabulary = {token: index for index, token in enumerate(["<eos>", *alphabet, newline + lead])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(newline, lead)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def fallback_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: what has no piece of its own is written in bytes, <0x0A> for a newline."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é", "€", "a\n", "\n"]
    if kind == "unigram":
        model = models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0, byte_fallback=True)
    else:
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
        model = models.BPE(vocabulary, [("▁", "a"), ("a", "\n")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


BYTES = byte_tokenizer()
KINDS = {"bytes": BYTES, "words": WORDS, **{kind: fallback_tokenizer(kind) for kind in ("bpe", "unigram")}}


def ids(text: str) -> list[int]:
    return [*WORDS(text, add_special_tokens=False)["input_ids"], EOS]


@pytest.mark.parametrize(
    ("completion", "steps"),
    [
        ("one\ntwo", ["one", "two"]),
        ("one\ntwo\n", ["one", "two"]),
        ("\n\none\n \n\ntwo", ["one", "two"]),
        ("one", ["one"]),
        ("", [""]),
        ("\n\n", ["\n\n"]),
    ],
)
def test_what_is_not_blank_is_a_step(completion: str, steps: list[str]) -> None:
    assert step_texts(completion, "\n") == steps
    assert len(step_ends(WORDS, ids(completion), "\n")) == len(steps)


@pytest.mark.parametrize(
    ("completion", "separator", "ends"),
    [
        ("one\ntwo", "\n", [1, 3]),  # tokens one, newline, two, EOS: the separator ends the step, EOS the last one
        ("one\n\n\ntwo\n", "\n", [1, 6]),  # the first newline ends it; what follows the last step belongs to it
        ("one.\ntwo", "\n", [1, 3]),  # a token that holds more than the separator
        ("one.\ntwo", ".\n", [1, 3]),
        ("onexyxytwo", "xy", [2, 6]),  # a separator of several tokens is complete with its last
        ("a\nb\nc", "\n", [0, 0, 1]),  # one token ends two steps
        ("one", "\n", [1]),
    ],
)
def test_a_step_ends_with_the_token_that_completes_its_separator(
    completion: str, separator: str, ends: list[int]
) -> None:
    assert step_ends(WORDS, ids(completion), separator) == ends


def test_a_completion_that_was_cut_ends_its_last_step_with_its_last_token() -> None:
    assert step_ends(WORDS, ids("one\ntwo")[:-1], "\n") == [1, 2]


def test_a_separator_may_share_a_token_with_half_a_character() -> None:
    token_ids = BYTES("é\n€")["input_ids"]  # é is two bytes; newline and the first byte of € are one token
    assert [BYTES.convert_ids_to_tokens(token_ids)] == [["Ã", "©", "Ċâ", "Ĥ", "¬"]]
    assert step_ends(BYTES, token_ids, "\n") == [2, 4]


def test_bytes_that_are_no_text_are_steps_too() -> None:
    broken = BYTES.convert_tokens_to_ids(["â", "Ċ", "a", "Ċ", "â"])
    assert step_ends(BYTES, broken, "\n") == [1, 3, 4]


@given(st.text(alphabet="aé€🙂\n ", max_size=12))
def test_the_tokens_up_to_each_end_decode_to_the_text_up_to_its_separator(text: str) -> None:
    token_ids = [*BYTES(text)["input_ids"], BYTES.eos_token_id]
    ends = step_ends(BYTES, token_ids, "\n")
    for end, step in zip(ends[:-1], step_texts(text, "\n")[:-1], strict=True):
        assert written_text(BYTES, token_ids[: end + 1]).rstrip("\ufffd").endswith(f"{step}\n")
        assert not written_text(BYTES, token_ids[:end]).rstrip("\ufffd").endswith(f"{step}\n")
    assert ends[-1] == len(token_ids) - 1


def test_a_newline_that_a_half_character_hides_for_a_while() -> None:
    """<0x0A> decodes to a newline, with the first bytes of a character to replacement characters, with all to both."""
    tokenizer = KINDS["bpe"]
    token_ids = tokenizer.convert_tokens_to_ids(["a", *(f"<0x{byte:02X}>" for byte in "\n🙂\n".encode()), "b"])
    texts = [written_text(tokenizer, token_ids[:end]) for end in range(1, 8)]
    assert texts == ["a", "a\n", "a\ufffd\ufffd", "a" + 3 * "\ufffd", "a" + 4 * "\ufffd", "a\n🙂", "a\n🙂\n"]
    assert step_ends(tokenizer, token_ids, "\n") == [1, 6, 7]


def expected_ends(tokenizer: PreTrainedTokenizerFast, token_ids: list[int], separator: str) -> list[int]:
    """The definition: every prefix is looked at."""
    text = written_text(tokenizer, token_ids)
    prefixes = [written_text(tokenizer, token_ids[: end + 1]) for end in range(len(token_ids))]
    ends, position = [], 0
    for piece in text.split(separator):
        position += len(piece) + len(separator)
        if piece.strip():
            ends.append(next((i for i, p in enumerate(prefixes) if p.startswith(text[:position])), len(prefixes) - 1))
    return [*ends[:-1], len(token_ids) - 1]


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_tokens_of_every_kind_of_tokenizer_have_steps(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    usual = [*tokenizer.convert_tokens_to_ids(tokenizer.tokenize("a\nb\n€ a🙂é")), tokenizer.eos_token_id]
    token = st.sampled_from(usual) | st.integers(0, len(tokenizer) - 1)
    token_ids = data.draw(st.lists(token, min_size=1, max_size=24))
    separator = data.draw(st.sampled_from(["\n", "\n\n", "a"]))
    ends = step_ends(tokenizer, token_ids, separator)
    assert ends == expected_ends(tokenizer, token_ids, separator)
    assert len(ends) == len(step_texts(written_text(tokenizer, token_ids), separator))
    assert ends == sorted(ends)


def test_ends_are_counted_in_the_sequence_and_only_over_sampled_tokens() -> None:
    sampled = ids("one\ntwo")
    token_ids = [7, 7, 7, *sampled[:2], 8, 8, *sampled[2:]]  # 8: said by an environment
    mask = [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    assert step_tokens(WORDS, token_ids, mask, "\n") == [4, 8]
