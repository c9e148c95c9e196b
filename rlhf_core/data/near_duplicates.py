"""Rows that are nearly the same text, found by MinHash sketches and locality-sensitive hashing; loads no torch.

A text is the set of its sequences of five words; the similarity of two texts is the share of these that they have in
common (Jaccard). A sketch estimates it to within 0.03. Of pairs with a similarity of 0.8 about 95 % are found, of 0.9
all but 1 in 10,000. Time and memory grow with the number of rows: a bucket of rows that look alike has two candidates
for each row, however full it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Sketches = NDArray[np.uint16]  # (rows, 128): the lower half of each minimum, which is enough to compare it by

_SLOTS, _BANDS, _SEED = 128, 16, 0
_WORDS_IN_SEQUENCE = 5
_WORD = re.compile("[\u2e80-\U0003ffff]|[^\\s\u2e80-\U0003ffff]+")  # East Asian scripts write no spaces: sign by sign
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers hash the slots of a band to 64 bits
_ROWS_AT_ONCE = 1 << 16
_CHARACTERS_AT_ONCE = 1 << 22
_CHARACTERS_IN_BATCH = 1 << 18
_NONE = -1


@dataclass
class NearDuplicates:
    """Finds, among rows that are added one by one, those that resemble an earlier one or ask a known prompt.

    Holds 256 bytes for each row.
    """

    prompts: Sequence[str]  # that rows should not resemble, such as those of held-out datasets
    threshold: float
    _texts: list[str] = field(default_factory=list)  # of the last rows, not sketched yet
    _asked: list[str] = field(default_factory=list)
    _waiting: int = 0  # characters in these
    _sketches: list[Sketches] = field(default_factory=list)
    _near_prompt: list[NDArray[np.bool_]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prompt_sketches = sketch(self.prompts)

    def add(self, text: str, asked: str) -> None:
        """A row: its whole text, and what it asks."""
        self._texts.append(text)
        self._asked.append(asked if self.prompts else "")
        self._waiting += len(text)
        if self._waiting >= _CHARACTERS_AT_ONCE:
            self._sketch_waiting()

    def finish(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(rows,) each: an earlier row that it resembles, or -1; whether it resembles one of the prompts."""
        self._sketch_waiting()
        if not self._sketches:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
        near_prompt = np.concatenate(self._near_prompt)
        sketches = np.concatenate(self._sketches)
        self._sketches, self._near_prompt = [], []
        return similar_earlier(sketches, self.threshold), near_prompt

    def _sketch_waiting(self) -> None:
        if not self._texts:
            return
        sketches = sketch(self._texts)
        if self.prompts:
            asked = sketches if self._asked == self._texts else sketch(self._asked)
            near_prompt = similar_of(asked, self._prompt_sketches, self.threshold) != _NONE
        else:
            near_prompt = np.zeros(len(sketches), dtype=np.bool_)
        self._sketches.append(sketches)
        self._near_prompt.append(near_prompt)
        self._texts, self._asked, self._waiting = [], [], 0


def sketch(texts: Sequence[str]) -> Sketches:
    """One sketch a text; equal on every machine."""
    from rensa import RMinHash

    sketches = np.empty((len(texts), _SLOTS), dtype=np.uint16)
    for start, end in _batches(texts):
        sequences = [_sequences(text) for text in texts[start:end]]
        minima = RMinHash.digest_matrix_from_token_sets(sequences, _SLOTS, _SEED).to_rows()
        sketches[start:end] = np.array(minima, dtype=np.uint32) & 0xFFFF
    return sketches


def _batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Texts that are sketched together: few enough that their sequences take little memory."""
    start = characters = 0
    for index, text in enumerate(texts):
        characters += len(text)
        if characters >= _CHARACTERS_IN_BATCH or index == len(texts) - 1:
            yield start, index + 1
            start, characters = index + 1, 0


def _sequences(text: str) -> list[str]:
    words = _WORD.findall(text.lower())
    if len(words) <= _WORDS_IN_SEQUENCE:
        return [" ".join(words)]
    starts = range(len(words) - _WORDS_IN_SEQUENCE + 1)
    return [" ".join(words[start : start + _WORDS_IN_SEQUENCE]) for start in starts]


def similar_earlier(sketches: Sketches, threshold: float) -> NDArray[np.int64]:
    """(rows,) int64: an earlier row with an estimated similarity of at least `threshold`, or -1."""
    rows = np.arange(len(sketches))
    similar = np.full(len(rows), _NONE)
    for band in range(_BANDS):
        buckets = _buckets(sketches, band)
        order = np.argsort(buckets, kind="stable")  # rows of a bucket side by side, the earliest first
        position = np.empty_like(order)
        position[order] = rows
        first_of_bucket = order[np.searchsorted(buckets, buckets, sorter=order)]
        one_before = order[np.maximum(position - 1, 0)]
        for candidates in (first_of_bucket, one_before):
            same_bucket = (candidates < rows) & (buckets[candidates] == buckets)
            _take_similar(similar, sketches, sketches, candidates, same_bucket, threshold)
    return similar


def similar_of(sketches: Sketches, others: Sketches, threshold: float) -> NDArray[np.int64]:
    """(rows,) int64: a row of `others` with an estimated similarity of at least `threshold`, or -1."""
    similar = np.full(len(sketches), _NONE)
    if not len(others):
        return similar
    for band in range(_BANDS):
        buckets, other_buckets = _buckets(sketches, band), _buckets(others, band)
        order = np.argsort(other_buckets, kind="stable")
        first = np.searchsorted(other_buckets, buckets, sorter=order, side="left")
        last = np.searchsorted(other_buckets, buckets, sorter=order, side="right") - 1
        for position in (first, last):
            candidates = order[np.clip(position, 0, len(others) - 1)]
            _take_similar(similar, sketches, others, candidates, other_buckets[candidates] == buckets, threshold)
    return similar


def _buckets(sketches: Sketches, band: int) -> NDArray[np.uint64]:
    """(rows,) a hash of the band's slots: rows that agree in all of them are in the same bucket."""
    width = _SLOTS // _BANDS
    buckets = np.zeros(len(sketches), dtype=np.uint64)
    for slot in range(band * width, (band + 1) * width):
        buckets = buckets * _MULTIPLIER + sketches[:, slot]
    return buckets


def _take_similar(
    similar: NDArray[np.int64],
    sketches: Sketches,
    others: Sketches,
    candidates: NDArray[np.int64],
    same_bucket: NDArray[np.bool_],
    threshold: float,
) -> None:
    """Enter into `similar` the candidates of rows that have none yet, where the sketches agree."""
    needed = math.ceil(threshold * _SLOTS - 1e-9)
    undecided = np.flatnonzero(same_bucket & (similar == _NONE))
    for start in range(0, len(undecided), _ROWS_AT_ONCE):
        rows = undecided[start : start + _ROWS_AT_ONCE]
        agreeing = (sketches[rows] == others[candidates[rows]]).sum(axis=1)
        found = rows[agreeing >= needed]
        similar[found] = candidates[found]
