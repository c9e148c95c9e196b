"""Overlap of datasets: held-out prompts must not be in training data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.data.formats import Format, Rows, normalised
from rlhf_core.errors import shortened

_EXAMPLES = 3
_HEAD_LENGTHS = (16, 4, 1)  # characters
_WORD_START = re.compile(r"[^\W_]+|\S")  # letters and digits together, every other sign alone


class PromptIndex:
    """The prompts of other datasets, compared with whitespace normalised.

    A row of prompts, conversations or preferences contains such a prompt if one of its user turns, or its user turns up
    to any one of them, equals it (Format.asked_texts); a row of text if the prompt occurs in it anywhere, at word
    boundaries (Format.running_text).
    """

    def __init__(self, datasets: Mapping[str, Rows]) -> None:
        """datasets: by name."""
        self._dataset_of: dict[str, str] = {}
        for name, dataset in datasets.items():
            prompts = (normalised(dataset.format.asked_text(row)) for row in dataset.rows)
            for prompt in filter(None, prompts):
                self._dataset_of.setdefault(prompt, name)
        # Texts are searched by how a prompt begins, in up to 16 characters: head length -> head -> prompt lengths.
        # Only lengths are kept, because generated prompts often begin all alike.
        self._heads: dict[int, dict[str, set[int]]] = {}
        for prompt in self._dataset_of:
            length = next(length for length in _HEAD_LENGTHS if length <= len(prompt))
            self._heads.setdefault(length, {}).setdefault(prompt[:length], set()).add(len(prompt))

    @property
    def prompts(self) -> list[str]:
        return list(self._dataset_of)

    def find(self, row: Mapping[str, Any], data_format: Format) -> tuple[str, str] | None:
        """Return the dataset and the prompt of it that the canonical row contains; None if it contains none."""
        if not self._dataset_of:
            return None
        questions = map(normalised, data_format.asked_texts(row))
        prompt = min((text for text in questions if text in self._dataset_of), default=None)
        if prompt is None:
            prompt = self._find_in_text(normalised(data_format.running_text(row)))
        return None if prompt is None else (self._dataset_of[prompt], prompt)

    def _find_in_text(self, text: str) -> str | None:
        starts = [word.start() for word in _WORD_START.finditer(text)]
        for head_length, lengths_of in self._heads.items():
            heads = [text[start : start + head_length] for start in starts]
            if lengths_of.keys().isdisjoint(heads):
                continue
            for start, head in zip(starts, heads, strict=True):
                for length in lengths_of.get(head, ()):
                    prompt = text[start : start + length]
                    if prompt in self._dataset_of and not _cuts_a_word(text, start + length):
                        return prompt
        return None


def _cuts_a_word(text: str, end: int) -> bool:
    return end < len(text) and text[end - 1].isalnum() and text[end].isalnum()


def overlap_problem(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    data_format: Format,
    held_out: Mapping[str, Rows],
    excluded: Mapping[str, Rows],
) -> str | None:
    """Return the problem of a dataset with the known `rows` (place, canonical row); None if none overlaps.

    held_out, excluded: the datasets that it is compared with, by name; rows with a prompt of `excluded` are dropped
    before they are compared.
    """
    held_out_prompts, excluded_prompts = PromptIndex(held_out), PromptIndex(excluded)
    read = overlapping = 0
    examples: list[str] = []
    for where, row in rows:
        read += 1
        if (overlap := held_out_prompts.find(row, data_format)) and not excluded_prompts.find(row, data_format):
            overlapping += 1
            if len(examples) < _EXAMPLES:
                dataset, prompt = overlap
                examples.append(f"{where} contains {shortened(prompt, 60)!r} of `{dataset}`")
    if not overlapping:
        return None
    return (
        f"{overlapping} of {read} rows contain a prompt of a dataset that the recipe evaluates or validates on: "
        f"{'; '.join(examples)}. "
        "Name that dataset in `exclude` to leave these rows out, or set on_overlap to `allow` to train on them"
    )
