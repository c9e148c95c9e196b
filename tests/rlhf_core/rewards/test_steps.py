"""Steps of a completion end at tokens that were sampled, also where characters and separators share tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.chat import decode_completion
from rlhf_core.data.tokenizers import word_level_tokenizer
from rlhf_core.rewards.steps import step_ends, step_texts, step_tokens
from rlhf_core.types import Prompt, Trajectory

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


BYTES = byte_tokenizer()


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
        assert decode_completion(BYTES, token_ids[: end + 1]).rstrip("\ufffd").endswith(f"{step}\n")
        assert not decode_completion(BYTES, token_ids[:end]).rstrip("\ufffd").endswith(f"{step}\n")
    assert ends[-1] == len(token_ids) - 1


def test_ends_are_counted_in_the_trajectory_and_only_over_sampled_tokens() -> None:
    sampled = ids("one\ntwo")
    token_ids = torch.tensor([7, 7, 7, *sampled[:2], 8, 8, *sampled[2:]])  # 8: said by an environment
    mask = torch.tensor([False] * 3 + [True] * 2 + [False] * 2 + [True] * 2)
    trajectory = Trajectory(Prompt("p", "", (7, 7, 7), {}), token_ids, mask, torch.zeros(9), 0, "stop")
    assert step_tokens(WORDS, trajectory, "\n") == [4, 8]
