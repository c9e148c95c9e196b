"""The steps of a completion, for process rewards: the pieces of its text, and the last token of each.

The steps are the pieces between separators that are not blank, so that empty lines get no reward. A completion without
any is one step. A separator belongs to the step before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rlhf_core.chat.encoding import Tokenizer, written_text


def step_texts(completion: str, separator: str) -> list[str]:
    """Return the steps of a completion without their separators; at least one."""
    return [piece for piece in completion.split(separator) if piece.strip()] or [completion]


def step_ends(tokenizer: Tokenizer, token_ids: Sequence[int], separator: str) -> list[int]:
    """Return the index in `token_ids`, a completion, of the last token of each step of `step_texts`.

    The last token of a step is the one that completes the separator after it: the first with which the tokens so far
    decode to the text up to there. That of the last step is the last token of the completion, such as the end of the
    text. Two steps that end in one token have the same index.
    Prefixes of the sampled tokens are decoded; nothing is re-tokenised.
    """
    text = written_text(tokenizer, token_ids)
    position = 0
    complete: list[int] = []  # characters up to the end of each step, including its separator
    for piece in text.split(separator):
        position += len(piece) + len(separator)
        if piece.strip():
            complete.append(position)
    ends: list[int] = []
    for position in complete[:-1]:
        ends.append(completed(tokenizer, token_ids, text, position, first=ends[-1] if ends else 0))
    return [*ends, len(token_ids) - 1]


def completed(tokenizer: Tokenizer, token_ids: Sequence[int], text: str, position: int, *, first: int) -> int:
    """Return the first token from `first` on with which the completion decodes to the first `position` characters of
    `text`, with or without more.

    A later token can undo that for a while: with byte fallback, a newline and the first byte of a character decode to
    two replacement characters, until the character's last byte is there. So one such token is searched by bisection,
    and the tokens before it are checked back to a text that was complete and shorter.
    """

    def decoded(index: int) -> str:
        return written_text(tokenizer, token_ids[: index + 1])

    def reaches(index: int) -> bool:
        return decoded(index).startswith(text[:position])

    last = first + bisect_left(range(first, len(token_ids) - 1), True, key=reaches)
    for index in range(last - 1, first - 1, -1):
        prefix = decoded(index)
        if prefix.startswith(text[:position]):
            last = index
        elif text.startswith(prefix):
            break
    return last


def step_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], mask: Sequence[bool], separator: str) -> list[int]:
    """Return the index in `token_ids` of the last token of each step: where process rewards are placed, and a process
    reward model is trained and read.

    mask: true on the tokens of the completion, the only ones with steps; as long as token_ids.
    """
    places = [index for index, sampled in enumerate(mask) if sampled]
    return [places[end] for end in step_ends(tokenizer, [token_ids[place] for place in places], separator)]
