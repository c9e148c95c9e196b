"""What is shown of a reply while it is sampled can be no longer than what is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_core.environments.agents.api import text_deltas
from rlhf_core.environments.agents.api.text_deltas import TextDeltas, until_any


class Bytes:
    """A tokenizer whose tokens are bytes; 0 is special."""

    def __init__(self) -> None:
        self.read = 0  # tokens that were decoded

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        self.read += len(tokens)
        return bytes(token for token in tokens if token).decode(errors="replace")


@pytest.fixture(autouse=True)
def _bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_deltas, "stop_token_ids", lambda tokenizer: (0,))


def shown(text: str, stop: Sequence[str] = (), marker: str | None = None, *, hold: bool = False) -> list[str]:
    """What is shown after each byte, and at the end."""
    tokenizer: Any = Bytes()
    deltas = TextDeltas(tokenizer, stop, marker, hold=hold)
    tokens = text.encode()
    pieces = [deltas.more(tokens[:count]) for count in range(1, len(tokens) + 1)]
    return [*pieces, deltas.rest(until_any(text, stop))]


def test_every_character_is_shown_once_it_is_whole() -> None:
    assert shown("aé€") == ["a", "", "é", "", "", "€", ""]


def test_what_may_be_a_stop_text_waits_until_it_is_none() -> None:
    assert shown("aSTb", ["STOP"]) == ["a", "", "", "STb", ""]
    assert shown("aSTOPb", ["STOP"]) == ["a", "", "", "", "", "", ""]
    assert shown("aST", ["STOP"]) == ["a", "", "", "ST"]


def test_nothing_of_a_call_is_shown() -> None:
    assert shown("a<call>{}", marker="<call>")[:-1] == ["a", *[""] * 8]
    assert shown("a<b", marker="<call>") == ["a", "", "<b", ""]
    assert shown('{"name"', marker="<call>")[:-1] == [""] * 7  # a call without its mark
    assert shown("abc", hold=True) == ["", "", "", "abc"]


def test_a_thought_is_shown_though_a_call_may_follow_it() -> None:
    assert "".join(shown("<think>a</think> b", marker="<call>")) == "<think>a</think> b"
    assert shown("<think>a</think>b", marker="<call>")[6] == "<think>"
    assert "".join(shown('<think>a</think> {"name"', marker="<call>")[:-1]) == "<think>a</think> "
    assert shown("<thin", marker="<call>")[:-1] == [""] * 5  # so far it may be a call without its mark


def test_only_new_tokens_are_decoded() -> None:
    tokenizer: Any = Bytes()
    deltas = TextDeltas(tokenizer, ("STOP",), "<call>", hold=False)
    text = "aé€" * 1000
    tokens = text.encode()
    pieces = [deltas.more(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert "".join(pieces) == text
    assert tokenizer.read < 100 * len(tokens)


def test_what_is_shown_is_not_taken_back() -> None:
    tokenizer: Any = Bytes()
    deltas = TextDeltas(tokenizer, (), "<call>", hold=False)
    assert deltas.more(b"so ") == "so "
    assert deltas.rest("so") == ""  # as a parser returns it, stripped
    assert deltas.shown == "so "
