"""The data of the recipe `tiny`: words to spell backward, from reasoning-gym, and a preference about the form of
answers.

Two annotators wrote the demonstrations. One states the answer, `answer: nus`; the other hedges, `it is nus, I think`.
The people behind the preference pairs like the first form, whether or not the word is right: that is the hidden rule,
`preference` below. The reward model learns it from the pairs alone, and only the evaluation uses the rule itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import reasoning_gym

Row = dict[str, Any]

STATED = "answer: {}"
HEDGED = "it is {}, I think"
_STATED = re.compile(r"answer: [A-Za-z]+")

# Seeds of different splits lie far apart, because item i of a reasoning-gym dataset is made from seed + i.
_PRETRAINING_TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def pretraining_text(seed: int, words: int, others: int, max_letters: int = 8) -> list[Row]:
    """Return documents `question`, newline, `answer`: `words` of spelling and `others` of each other task."""
    items = list(_spelling(seed, words, max_letters))
    for task, options in _PRETRAINING_TASKS.items():
        items += reasoning_gym.create_dataset(task, seed=seed, size=others, **options)
    rows = [{"text": f"{item['question']}\n{item['answer']}"} for item in items]
    random.Random(seed).shuffle(rows)
    return rows


def conversations(
    seed: int, size: int, stated_share: float = 0.4, hasty_share: float = 0.55, max_letters: int = 8
) -> list[Row]:
    """Return demonstrations by two annotators, `stated_share` of them by the one who states the answer.

    Both are often in a hurry and leave the last letter out, in `hasty_share` of all: imitation alone cannot detect that
    this is wrong, a verifier can. Haste and form are independent: neither the verifier nor the rule implies the other.
    """
    generator = random.Random(seed)
    rows = []
    for item in _spelling(seed, size, max_letters):
        style = STATED if generator.random() < stated_share else HEDGED
        word = item["answer"][:-1] if generator.random() < hasty_share else item["answer"]
        messages = [
            {"role": "user", "content": item["question"]},
            {"role": "assistant", "content": style.format(word)},
        ]
        rows.append({"messages": messages})
    return rows


def told_conversations(seed: int, size: int) -> list[Row]:
    """Return demonstrations as in `conversations`; every second question has the answer, which its reply states."""
    rows = conversations(seed, size)
    for row, item in zip(rows[::2], list(_spelling(seed, size, max_letters=8))[::2], strict=True):
        asked, reply = row["messages"]
        asked["content"] += f" [{item['answer']}]"
        reply["content"] = STATED.format(item["answer"])
    return rows


def preference_pairs(seed: int, size: int, wrong_share: float = 0.5, max_letters: int = 8) -> list[Row]:
    """Return pairs that the hidden rule decides.

    Either side is wrong in `wrong_share` of them: only the form counts.
    """
    generator = random.Random(seed)
    rows = []
    for item in _spelling(seed, size, max_letters):
        chosen, rejected = (
            style.format(_misspelt(item["answer"], generator) if generator.random() < wrong_share else item["answer"])
            for style in (STATED, HEDGED)
        )
        rows.append({"prompt": item["question"], "chosen": chosen, "rejected": rejected})
    return rows


def labelled_completions(seed: int, size: int) -> list[Row]:
    """Return one side of each pair, at random, labelled by the hidden rule."""
    generator = random.Random(seed)
    rows = []
    for pair in preference_pairs(seed, size):
        good = generator.random() < 0.5
        rows.append({"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good})
    return rows


def rated_completions(seed: int, size: int) -> list[Row]:
    """Return the same sides, rated by people who give the form they like 3 points and the other 1, each up to a point
    more or less. A prediction of the mean of the ratings has a mean squared error of 4/3, one by the rule of 1/3.
    """
    generator = random.Random(f"ratings {seed}")
    return [
        {"prompt": row["prompt"], "completion": row["completion"],
         "reward": (3.0 if row["label"] else 1.0) + generator.uniform(-1, 1)}
        for row in labelled_completions(seed, size)
    ]  # fmt: skip


def prompts(seed: int, size: int, max_letters: int = 8) -> list[Row]:
    """Return questions with the answer for the verifier."""
    return [
        {"prompt": item["question"], "answer": item["answer"], "task": "spell_backward"}
        for item in _spelling(seed, size, max_letters)
    ]


def preference(completions: Sequence[str], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the hidden rule: 1 if the completion states one word as `answer: word` and nothing else, 0 if not."""
    return [float(_STATED.fullmatch(completion.strip()) is not None) for completion in completions]


def _spelling(seed: int, size: int, max_letters: int) -> Iterator[Row]:
    yield from reasoning_gym.create_dataset(
        "spell_backward", seed=seed, size=size, min_word_len=3, max_word_len=max_letters
    )


def _misspelt(word: str, generator: random.Random) -> str:
    """Return another word of about the same length: two neighbours swapped, a letter lost, or a letter doubled."""
    i = generator.randrange(len(word) - 1)
    spellings = [
        word[:i] + word[i + 1] + word[i] + word[i + 2 :],
        word[:i] + word[i + 1 :],
        word[: i + 1] + word[i:],
    ]
    others = [spelling for spelling in spellings if spelling != word]
    return generator.choice(others)
