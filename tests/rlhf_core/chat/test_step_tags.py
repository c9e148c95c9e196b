"""Step tags: the text with a tag after each step, the tag's last token, and the tokens of labels."""

from __future__ import annotations

import pytest

from rlhf_core.chat.encoding import Tokenizer, written_text
from rlhf_core.chat.step_tags import encode_tagged, label_ids
from rlhf_core.chat.tokenizers import word_level_tokenizer
from rlhf_core.errors import ConversationError

ASKED = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return word_level_tokenizer((" k", "k\n", "=4"), 256, images=False)


@pytest.mark.parametrize("tag", [" k", " kb", "#"])
def test_each_step_is_read_at_the_last_token_of_its_tag(tokenizer: Tokenizer, tag: str) -> None:
    steps = ["1+1 k", "", "so 4"]  # one that holds a tag, and a blank one
    ids, ends = encode_tagged(tokenizer, ASKED, steps, separator="\n", tag=tag)
    text = written_text(tokenizer, ids)
    assert text.endswith(f"1+1 k{tag}\n{tag}\nso 4{tag}")
    assert ends[-1] == len(ids) - 1  # nothing follows the last tag
    read = [written_text(tokenizer, ids[: end + 1]) for end in ends]
    before = text.removesuffix(f"1+1 k{tag}\n{tag}\nso 4{tag}")
    assert [each.removeprefix(before) for each in read] == [
        f"1+1 k{tag}", f"1+1 k{tag}\n{tag}", f"1+1 k{tag}\n{tag}\nso 4{tag}",
    ]  # fmt: skip


def test_a_tag_joined_to_the_separator_ends_in_their_token(tokenizer: Tokenizer) -> None:
    ids, ends = encode_tagged(tokenizer, ASKED, ["a", "b"], separator="\n", tag="k")
    assert [tokenizer.decode([ids[end]]) for end in ends] == ["k\n", "k"]


def test_labels_are_tokens_or_texts_of_one(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    assert label_ids(tokenizer, ("+", "-")) == (vocabulary["+"], vocabulary["-"])
    assert label_ids(tokenizer, ("=4", "-")) == (vocabulary["=4"], vocabulary["-"])
    with pytest.raises(ConversationError, match="the label 'no' is 2 tokens of this model, expected one"):
        label_ids(tokenizer, ("+", "no"))
    with pytest.raises(ConversationError, match=r"the labels '\+' and '\+' are one token"):
        label_ids(tokenizer, ("+", "+"))
