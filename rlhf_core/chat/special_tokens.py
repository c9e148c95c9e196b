"""Special tokens are only written by the chat template and at the ends of documents: in texts they stay text.

A user who writes `<|im_end|>` does not end the turn. Before a template renders a conversation, every special token in
its texts is marked behind its first character, so that unmarked ones are the template's own. `token_ids` removes the
marks, and gives the marked ones the tokens of ordinary text. A conversation without any is tokenised as one text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from rlhf_core.chat.rendering import Tokenizer

T = TypeVar("T")

MARK = "\ufdd0"  # a code point that is no character; doubled, it is the character itself
_MARKS = re.compile(f"{MARK}{MARK}|{MARK}")
_ANCHORS = ("\n", "a", " ", "")  # text in front: some tokenizers put a space before every text


def is_special(tokenizer: Tokenizer, token: int) -> bool:
    return token in _special_ids(tokenizer)


def special_tokens_in(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(dict.fromkeys(match.group() for match in _pattern(tokenizer).finditer(text)))


def unknown_in(tokenizer: Tokenizer, text: str) -> str:
    """Return the first part of the text without a token; empty if there is none."""
    unknown = tokenizer.unk_token_id
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return next((text[start:end] for token, (start, end) in spans if token == unknown), "")


def marked(tokenizer: Tokenizer, value: T) -> T:
    """Return `value` with the special tokens marked in all of its texts: one, or lists and mappings of texts at any
    depth.
    """
    changed: Any = value
    if isinstance(value, str):
        doubled = value.replace(MARK, MARK * 2)
        changed = _pattern(tokenizer).sub(lambda match: match.group()[:1] + MARK + match.group()[1:], doubled)
    elif isinstance(value, Mapping):
        changed = {marked(tokenizer, key): marked(tokenizer, item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        changed = [marked(tokenizer, item) for item in value]
    return changed  # type: ignore[no-any-return]


def unmarked(text: str) -> str:
    return _MARKS.sub(lambda match: match.group()[1:], text)


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the tokens of a text in which `marked` special tokens are ordinary text, and others are special.

    add_special_tokens: those of the tokenizer around a text, such as BOS; a template has written them already.
    """
    if not text and not add_special_tokens:
        return []
    encoded = tokenizer(
        unmarked(text), add_special_tokens=add_special_tokens, return_offsets_mapping=MARK in text, verbose=False
    )
    ids: list[int] = list(encoded["input_ids"])
    if MARK not in text:
        return ids
    starts = set(_marked_starts(text))
    plain = unmarked(text)
    result: list[int] = []
    for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True):
        if is_special(tokenizer, token) and starts.intersection(range(start, end)):
            result += _as_text(tokenizer, plain[start:end])
        else:
            result.append(token)
    return result


def following_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that follows others, as in `token_ids`, without the space that some tokenizers
    prepend to every text.
    """
    for anchor in filter(None, _ANCHORS):
        before, ids = token_ids(tokenizer, anchor), token_ids(tokenizer, anchor + text)
        if ids[: len(before)] == before:  # no token is part of both
            return ids[len(before) :]
    return token_ids(tokenizer, text)


def _marked_starts(text: str) -> Iterator[int]:
    """Yield the start of each marked token in the text without marks."""
    for removed, mark in enumerate(_MARKS.finditer(text)):
        if len(mark.group()) == 1:
            yield mark.start() - removed - 1


@lru_cache(maxsize=4096)
def _as_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of a special token as ordinary text."""
    for anchor in _ANCHORS:
        encoded = tokenizer(
            anchor + text,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )
        spans = list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
        if any(start < len(anchor) < end for _, (start, end) in spans):
            continue  # a token that is part of both
        ids = tuple(token for token, (_, end) in spans if end > len(anchor))
        unknown = None if text == tokenizer.unk_token else tokenizer.unk_token_id
        if len(text) > 1 and any(is_special(tokenizer, token) and token != unknown for token in ids):
            # A vocabulary of text pieces that holds the special token as one of them.
            return _as_text(tokenizer, text[:1]) + _as_text(tokenizer, text[1:])
        return ids
    return _as_text(tokenizer, text[:1]) + _as_text(tokenizer, text[1:])


@lru_cache(maxsize=32)
def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*tokenizer.all_special_ids, *added))


@lru_cache(maxsize=32)
def _pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern of the longest special token at a place."""
    tokens = sorted({str(tokenizer.convert_ids_to_tokens(index)) for index in _special_ids(tokenizer)}, key=len)
    return re.compile("|".join(map(re.escape, reversed(tokens))) or "(?!)")
