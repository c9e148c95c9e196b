"""The data of the recipe `tiny-process`: the words of `tiny`, spelled a letter a line, with labels of right letters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import reasoning_gym

Row = dict[str, Any]

LETTER_END = "\n"


def spelled(seed: int, size: int, wrong_share: float = 0.15) -> list[Row]:
    """Return demonstrations with one letter of the word a line, which is a step, by somebody who often errs."""
    generator = random.Random(seed)
    rows = []
    for item in _spelling(seed, size):
        reply = {"role": "assistant", "content": LETTER_END.join(_letters(item["answer"], wrong_share, generator))}
        rows.append({"messages": [{"role": "user", "content": item["question"]}, reply]})
    return rows


def judged_letters(seed: int, size: int, most_wrong: float = 0.6) -> list[Row]:
    """Return spelled words of people who each err in another share of the letters, `most_wrong` at most, and write
    letters that the word does not have: a policy finds every mistake that its reward was never shown.

    A letter is right where the answer has it, the last one if the answer ends there too.
    """
    generator = random.Random(seed)
    rows = []
    for item in _spelling(seed, size):
        word = item["answer"]
        letters = _letters(word, generator.uniform(0, most_wrong), generator, foreign=ascii_lowercase)
        labels = [word[index : index + 1] == letter for index, letter in enumerate(letters)]
        labels[-1] = labels[-1] and len(letters) == len(word)
        rows.append({"prompt": item["question"], "steps": letters, "labels": labels})
    return rows


def right_word(completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return 1 if the letters of the completion, one a line, are those of the answer."""
    return [
        float(completion.split(LETTER_END) == list(row["answer"]))
        for completion, row in zip(completions, rows, strict=True)
    ]


def _spelling(seed: int, size: int) -> Iterator[Row]:
    """Yield items; item i is made from seed + i, as in tiny_tasks.py."""
    yield from reasoning_gym.create_dataset("spell_backward", seed=seed, size=size, min_word_len=3, max_word_len=8)


def _letters(word: str, wrong_share: float, generator: random.Random, foreign: str = "") -> list[str]:
    """Return the word's letters with errors: another of its letters or of `foreign`, one left out, or one twice."""
    letters: list[str] = []
    for letter in word:
        error = generator.choice(["another", "none", "twice"]) if generator.random() < wrong_share else ""
        another = generator.choice(word)
        if foreign and generator.random() < 0.5:
            another = generator.choice(foreign)
        letters += {"another": [another], "none": [], "twice": [letter, letter]}.get(error, [letter])
    return letters or [word[0]]
