"""Which rows repeat a prompt of another dataset: what a model is tested on must not be in what it is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.data.formats import asked_texts, normalised, prompt_text


class Exclusion:
    """The prompts of other datasets, compared with whitespace normalised.

    A row of prompts, conversations or preferences is excluded if a user turn of it, or its user turns up to any one
    of them, is such a prompt; a row of text if such a prompt occurs in it anywhere, at word boundaries.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]):
        self.prompts = frozenset(filter(None, map(prompt_text, rows)))
        # Texts are scanned by the first characters of the prompts, as many as the shortest prompt has.
        self._head = min((len(prompt) for prompt in self.prompts), default=0)
        self._by_head: dict[str, list[str]] = {}
        for prompt in self.prompts:
            self._by_head.setdefault(prompt[: self._head], []).append(prompt)

    def __contains__(self, row: Mapping[str, Any]) -> bool:
        if not self.prompts:
            return False
        if "text" in row:
            return self._occurs_in(normalised(row["text"]))
        return not self.prompts.isdisjoint(asked_texts(row))

    def _occurs_in(self, text: str) -> bool:
        for start in range(len(text) - self._head + 1):
            for prompt in self._by_head.get(text[start : start + self._head], ()):
                if text.startswith(prompt, start) and _whole(text, start, start + len(prompt)):
                    return True
        return False


def _whole(text: str, start: int, end: int) -> bool:
    """Neither end cuts a word or a number in two."""
    cuts_start = start > 0 and text[start - 1].isalnum() and text[start].isalnum()
    cuts_end = end < len(text) and text[end - 1].isalnum() and text[end].isalnum()
    return not (cuts_start or cuts_end)
