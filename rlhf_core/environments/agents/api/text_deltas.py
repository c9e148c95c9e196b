"""The text of a reply while it is sampled: only what no later token can change is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_core.chat.encoding import Tokenizer, decode_completion, decoded, stop_token_ids

_OVERLAP = 8  # tokens that are decoded again with new ones: their spaces and bytes depend on those before them
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"  # around reasoning, which is no call
_CALLS = ("{", "[", "<")  # with which a reply that is a call alone begins, in formats whose mark may be left out
_INCOMPLETE = "\ufffd"  # the bytes of a character whose others are not sampled yet


class TextDeltas:
    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], marker: str | None, *, hold: bool) -> None:
        """stop: texts before which the reply ends. marker: begins a call of a tool, which is no text; none: there are
        no calls. hold: show nothing before the end.
        """
        self._stop, self._marker, self._hold = stop, marker, hold
        self._text = _GrowingText(tokenizer, decode_completion)
        self._written = _GrowingText(tokenizer, decoded)  # with special tokens, as which some marks are written
        self._ends = stop_token_ids(tokenizer)
        self.shown = ""

    def more(self, token_ids: Sequence[int]) -> str:
        """Return the text to show after what is shown. token_ids: all so far."""
        if self._hold:
            return ""
        if self._marker is not None:
            ended = token_ids and token_ids[-1] in self._ends
            if self._marker in self._written.of(token_ids[: len(token_ids) - bool(ended)]):
                return ""
        text = until_any(self._text.of(token_ids), self._stop).rstrip(_INCOMPLETE)
        if self._marker is not None:
            text = _before_a_call(text)
        marks = [*self._stop, *([] if self._marker is None else [self._marker])]
        return self._show(text[: len(text) - _begun(text, marks)])

    def rest(self, text: str) -> str:
        """Return the text to show at the end, of the whole text of the reply.

        A parser of calls may strip the text before them, of which nothing that is shown can be taken back.
        """
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[len(self.shown) :] if text.startswith(self.shown) else ""
        self.shown += new
        return new


class _GrowingText:
    """The text of tokens to which others are added: only the new ones are decoded, with a few before them."""

    def __init__(self, tokenizer: Tokenizer, decode: Callable[[Tokenizer, Sequence[int]], str]) -> None:
        self._tokenizer, self._decode = tokenizer, decode
        self._text, self._count = "", 0  # of the tokens up to a whole character

    def of(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens, which begin with those of the last call."""
        start = max(0, self._count - _OVERLAP)
        before = self._decode(self._tokenizer, token_ids[start : self._count])
        text = self._text + self._decode(self._tokenizer, token_ids[start:])[len(before) :]
        if not text.endswith(_INCOMPLETE):
            self._text, self._count = text, len(token_ids)
        return text


def _before_a_call(text: str) -> str:
    """Return the text up to what may be a call whose mark was left out: all that follows, or all behind a thought."""
    thought = ""
    if text.lstrip().startswith(_THOUGHT):
        inside, end, behind = text.partition(_END_OF_THOUGHT)
        thought, text = inside + end, behind
    return thought if text.lstrip().startswith(_CALLS) else thought + text


def until_any(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of the texts `stop`."""
    ends = [text.find(each) for each in stop if each in text]
    return text[: min(ends)] if ends else text


def _begun(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which one of `marks` begins, but not all of it."""
    longest = max((len(mark) for mark in marks), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) and length < len(mark) for mark in marks):
            return length
    return 0
