"""The text of a reply while it is sampled: only what no later token can change is shown."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.chat.encoding import Tokenizer, decode_completion, written_text

_CALLS = ("{", "[", "<")  # with which a reply that is a call alone begins, in formats whose mark may be left out
_INCOMPLETE = "\ufffd"  # the bytes of a character whose others are not sampled yet


class TextDeltas:
    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], marker: str | None, *, hold: bool) -> None:
        """stop: texts before which the reply ends. marker: begins a call of a tool, which is no text; none: there are
        no calls. hold: show nothing before the end.
        """
        self._tokenizer, self._stop, self._marker, self._hold = tokenizer, stop, marker, hold
        self.shown = ""

    def more(self, token_ids: Sequence[int]) -> str:
        """Return the text to show after what is shown. token_ids: all so far."""
        if self._hold or (self._marker is not None and self._marker in written_text(self._tokenizer, token_ids)):
            return ""
        text = until_any(decode_completion(self._tokenizer, token_ids), self._stop).rstrip(_INCOMPLETE)
        if self._marker is not None and text.lstrip().startswith(_CALLS):
            return ""
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
