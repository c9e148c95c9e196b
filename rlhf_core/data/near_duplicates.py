"""Near-duplicates of rows by MinHash sketches and locality-sensitive hashing; loads no torch.

A text is the set of its sequences of five words; the similarity of two texts is the share of these that they have in
common (Jaccard). A sketch estimates it to within 0.03. Of pairs with a similarity of 0.8 about 95 % are found, of 0.9
all but 1 in 10,000. Time and memory grow with the number of rows: a bucket of similar rows has two candidates for each
row, whatever its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Sketches = NDArray[np.uint16]  # (rows, 128): the lower half of each minimum, which is enough to compare it by

_SLOTS, _BANDS, _SEED = 128, 16, 0
_WORDS_IN_SEQUENCE = 5
_WORD = re.compile("[\u2e80-\U0003ffff]|[^\\s\u2e80-\U0003ffff]+")  # East Asian scripts write no spaces: sign by sign
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers hash the slots of a band to 64 bits
_ROWS_AT_ONCE = 1 << 16
_CHARACTERS_IN_BATCH = 1 << 18
_NONE = -1


class Sketcher:
    """Sketches rows, and matches them with given prompts. Keeps no rows."""

    def __init__(self, prompts: Sequence[str], threshold: float) -> None:
        """prompts: those that rows should not resemble, such as those of held-out datasets."""
        self._threshold = threshold
        self._of_prompts = sketch(prompts)

    def __call__(self, texts: Sequence[str], questions: Sequence[str]) -> tuple[Sketches, NDArray[np.bool_]]:
        """Return the sketches of rows, and whether each resembles one of the prompts, (rows,). texts: the whole of each
        row; questions: of each row.
        """
        sketches = sketch(texts)
        if not len(self._of_prompts):
            return sketches, np.zeros(len(sketches), dtype=np.bool_)
        of_questions = sketches if list(questions) == list(texts) else sketch(questions)
        return sketches, similar_of(of_questions, self._of_prompts, self._threshold) != _NONE


class SketchFile:
    """Sketches on disk: 256 bytes per row, read from memory-mapped pages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def append(self, sketches: Sketches) -> None:
        with self._path.open("ab") as file:
            file.write(np.ascontiguousarray(sketches).tobytes())

    def read(self) -> Sketches:
        if not self._path.stat().st_size:
            return np.empty((0, _SLOTS), dtype=np.uint16)
        return np.memmap(self._path, dtype=np.uint16, mode="r").reshape(-1, _SLOTS)


def sketch(texts: Sequence[str]) -> Sketches:
    """Return one sketch per text; equal on every machine."""
    from rensa import RMinHash

    sketches = np.empty((len(texts), _SLOTS), dtype=np.uint16)
    for start, end in _batches(texts):
        sequences = [_sequences(text) for text in texts[start:end]]
        minima = RMinHash.digest_matrix_from_token_sets(sequences, _SLOTS, _SEED).to_rows()
        sketches[start:end] = np.array(minima, dtype=np.uint32) & 0xFFFF
    return sketches


def _batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield ranges of texts to be sketched together: few enough that their sequences take little memory."""
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
    """Return an earlier row with an estimated similarity of at least `threshold`, or -1, (rows,) int64."""
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
    """Return a row of `others` with an estimated similarity of at least `threshold`, or -1, (rows,) int64."""
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
    """Return a hash of the band's slots, (rows,): rows that agree in all of them are in the same bucket."""
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
        similar_rows = rows[agreeing >= needed]
        similar[similar_rows] = candidates[similar_rows]
