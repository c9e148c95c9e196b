"""Rows made from samples train the sampled tokens, and no end that was not sampled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlhf_core.chat import sampled_tokens
from rlhf_core.chat.encoding import encode_completion, encode_prompt, ended_completion, stop_token_ids
from rlhf_core.chat.sampled_tokens import SampledReply, tokenizer_digest
from rlhf_core.data.formats import RowError, canonical_row, format_of
from rlhf_core.data.reading import read_rows, write_dataset
from rlhf_core.data.sampled import (
    best_of,
    by_reward,
    comparisons,
    conditional,
    counted_truncated,
    labelled,
    preferences,
)
from rlhf_core.rl.keeping import rollout_rows
from rlhf_core.rl.rows import completions_row
from rlhf_core.supervised.examples import Example
from rlhf_core.supervised.kto import labelled_example
from rlhf_core.supervised.pairs import pair_example
from rlhf_core.supervised.sft import conversation_examples
from rlhf_core.supervised.targets import rewarded_completions
from rlhf_core.types import Prompt, Trajectory
from tests.rlhf_core.chat.families import TURNS, byte_level, one_line, space_before_text

# Asks with an open block, and writes an empty one before a reply that has none.
THINKS = one_line(r"""
    {% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {% else %}{{ '<|im_start|>assistant\n<think>\n' }}
    {% if '</think>' not in m.content %}{{ '</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endif %}
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}""")
TOKENIZER = byte_level(THINKS)
QUESTION = [{"role": "user", "content": "2+2?"}]
END = stop_token_ids(TOKENIZER)[-1]


def tokens(text: str) -> list[int]:
    """One for each byte, which no text is tokenised to where a merge fits."""
    return [token for letter in text for token in TOKENIZER(letter, add_special_tokens=False)["input_ids"]]


def completion(text: str, reward: float, *, cut: bool = False) -> dict[str, Any]:
    ids = tokens(text) + ([] if cut else [END])
    return {"text": text, "reward": reward, "token_ids": ids, "finish_reason": "length" if cut else "stop"}


def row(*completions: dict[str, Any], tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> dict[str, Any]:
    return {"id": "r", "prompt": QUESTION, "completions": list(completions), "tokenizer": tokenizer_digest(tokenizer)}


def examples(given: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, Example]:
    """What each kind of derived row trains, of a completion of reward 1 and one of 0."""
    counts: Counter[str] = Counter()
    (best,) = best_of(given, least_reward=None, counts=counts)
    compared = list(comparisons(given, every=False, counts=counts))
    (pair,) = preferences(compared, [by_reward(each, 0.0) for each in compared], counts)
    good, bad = labelled(given, threshold=0.5, margin=0.0, counts=counts)
    told, _ = conditional(given, text=" Reward: {reward}", decimals=0, counts=counts, written=Counter())
    rows = [json.loads(json.dumps(each)) for each in (best, pair, good, bad, told)]  # as a dataset artifact has them
    return {
        "best": conversation_examples(tokenizer, rows[0])[0],
        "pair": pair_example(tokenizer, rows[1]),
        "good": labelled_example(tokenizer, rows[2]),
        "bad": labelled_example(tokenizer, rows[3]),
        "conditional": conversation_examples(tokenizer, rows[4])[0],
        "regression": rewarded_completions(tokenizer, given)[0],
    }


def trained(example: Example, side: int = 0) -> list[int]:
    return [t for t, is_trained in zip(example.sequences[side], example.masks[side], strict=True) if is_trained]


@pytest.mark.parametrize("cut", [False, True])
def test_what_was_sampled_is_what_is_trained(cut: bool) -> None:
    high, low = completion("dab ab", 1.0, cut=cut), completion("no", 0.0)
    made = examples(row(high, low), TOKENIZER)
    asked = encode_prompt(TOKENIZER, QUESTION)
    for name in ("best", "pair", "good"):
        assert made[name].sequences[0] == asked + high["token_ids"]
        assert trained(made[name]) == high["token_ids"]
    assert trained(made["pair"], 1) == trained(made["bad"]) == low["token_ids"]
    assert trained(made["conditional"]) == high["token_ids"]
    assert made["conditional"].sequences[0][: len(asked)] != asked
    assert made["regression"].sequences[0] == asked + high["token_ids"]
    assert made["regression"].masks[0].index(True) == len(asked) + len(high["token_ids"]) - 1


@pytest.mark.parametrize("cut", [False, True])
def test_tokens_of_another_tokenizer_are_written_as_text(cut: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sampled_tokens._report_other_tokenizer.cache_clear()
    high, low = completion("dab ab", 1.0, cut=cut), completion("no", 0.0)
    other = byte_level(TURNS)
    made = examples(row(high, low), other)
    expected, _ = ended_completion(other, QUESTION, "dab ab")
    for name in ("best", "pair", "good"):
        ids = made[name].sequences[0]
        assert ids[: len(expected) - cut] == expected[: len(expected) - cut]
        assert trained(made[name])[-1] == (other("b")["input_ids"][0] if cut else END), "an end that was not sampled"
    assert capsys.readouterr().out.count("the tokens of sampled completions are not used: they were sampled with") == 1


def test_rollouts_that_rl_keeps_train_what_was_sampled() -> None:
    asked = encode_prompt(TOKENIZER, QUESTION)
    sampled = {text: [*tokens(text), END] for text in ("dab ab", "no")}
    made = [
        Trajectory(
            Prompt("p", "2+2?", tuple(asked), {"prompt": QUESTION}), torch.tensor([*asked, *ids]),
            torch.arange(len(asked) + len(ids)) >= len(asked), torch.zeros(len(asked) + len(ids)), 0, "stop",
            completion=text, reward=float(text == "dab ab"), extra={"r": 0.0},
        )
        for text, ids in sampled.items()
    ]  # fmt: skip
    (kept,) = rollout_rows(made, ["r"], 1, tokenizer=tokenizer_digest(TOKENIZER))
    found = examples(json.loads(json.dumps(kept)), TOKENIZER)
    assert found["pair"].sequences == tuple([*asked, *ids] for ids in sampled.values())
    assert found["best"].sequences == ([*asked, *sampled["dab ab"]],)


def test_completions_that_were_cut_are_counted_and_may_be_dropped() -> None:
    given = row(completion("a", 1.0, cut=True), completion("b", 0.0), completion("c", 0.5, cut=True))
    for drop, expected in ((False, "a"), (True, "b")):
        counts: Counter[str] = Counter()
        (best,) = best_of(counted_truncated(given, counts, drop=drop), least_reward=None, counts=counts)
        assert best["messages"][-1]["content"] == expected
        assert counts["truncated_completions"] == 2


def test_all_tokens_are_those_of_every_sequence() -> None:
    pair = canonical_row({"prompt": "x", "chosen": "ab", "rejected": "abcd"}, "preferences", {})
    longest = format_of("preferences").num_tokens(TOKENIZER, pair)
    assert format_of("preferences").all_tokens(TOKENIZER, pair) == 2 * longest - 2, "bytes are tokens here"
    talk = canonical_row({"prompt": "x", "completion": "abcd"}, "conversations", {})
    assert format_of("conversations").all_tokens(TOKENIZER, talk) == longest + 1, "a line ends each turn"


def test_a_file_of_completions_may_have_their_tokens() -> None:
    given = row(completion("ab", 1.0, cut=True))
    read = canonical_row(given, "completions", {})
    assert read["completions"] == given["completions"]
    assert read["tokenizer"] == given["tokenizer"]
    assert format_of("completions").num_tokens(TOKENIZER, read) == len(encode_prompt(TOKENIZER, QUESTION)) + 2
    for wrong in ({"token_ids": [1, "a"]}, {"token_ids": [True]}, {"finish_reason": "eos"}):
        (entry,) = given["completions"]
        with pytest.raises(RowError, match=rf"^`completions\[0\]\.{next(iter(wrong))}`"):
            canonical_row({**given, "completions": [{**entry, **wrong}]}, "completions", {})


@pytest.mark.parametrize("reply", ["ab", " ab", "a", "\nb"])
def test_a_reply_behind_a_space_has_the_tokens_of_its_place(reply: str) -> None:
    """Its first letter and that space would be one token, and by itself it gets a second space."""
    asks = (
        "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    )
    tokenizer = space_before_text(
        asks.replace("{{ m.content", "{{ ('A: ' if m.role == 'assistant' else '') + m.content")
    )
    ids, _ = encode_completion(tokenizer, QUESTION, reply)
    asked = encode_prompt(tokenizer, QUESTION)
    assert ids[: len(asked)] == asked
    assert tokenizer.decode(ids) == f"2+2?<|im_end|>A: {reply}<|im_end|>"


def test_a_completion_may_hold_what_a_row_of_a_user_may_not(tmp_path: Path) -> None:
    """A model of bytes samples byte 0, and what it has sampled is not lost for that."""
    odd, plain = {"text": "a\0", "reward": 1.0}, {"text": "b", "reward": 0.0}
    made = completions_row(QUESTION, {}, [odd, plain], tokenizer="x")
    write_dataset(tmp_path / "rows", [made], {"format": "completions"})
    (read,) = read_rows(tmp_path / "rows")
    (best,) = best_of(read, least_reward=None, counts=Counter())
    assert best["messages"][-1]["content"] == "a\0"
    with pytest.raises(RowError, match=r"^`completions\.0\.text` holds a NUL character$"):
        canonical_row({"prompt": "2+2?", "completions": [odd]}, "completions", {})


def test_of_text_alone_nothing_is_known() -> None:
    assert sampled_tokens.reply_of({"text": "a"}, None) is None
    assert SampledReply((), was_cut=True, tokenizer=None).read_by(TOKENIZER).token_ids == ()
