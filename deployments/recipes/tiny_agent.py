"""The agent of the recipe `tiny-agent`, and demonstrations for its questions.

It requests a word spelled backward, and checks that the answer has the letters of the word, which does not need the
answer. If not, it asks again in a new conversation, which contains the wrong answer.
"""

from __future__ import annotations

import random
import re
from typing import Any

import aiohttp
import reasoning_gym

Row = dict[str, Any]

ATTEMPTS, PRICE = 3, 0.1
_ANSWER = re.compile(r"answer: ([A-Za-z]+)")


async def run(row: Row, base_url: str, api_key: str) -> float:
    """Play an episode; return the price of all attempts but the first. The verifier judges the last answer."""
    question = row["prompt"][-1]["content"]
    word = question.rpartition(" ")[2]
    asked = question
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        for attempt in range(ATTEMPTS):
            found = _ANSWER.fullmatch(await _ask(session, base_url, asked))
            answer = found[1] if found else ""
            if sorted(answer) == sorted(word):
                return -PRICE * attempt
            asked = f"{question} (not {answer})"
    return -PRICE * (ATTEMPTS - 1)


async def _ask(session: aiohttp.ClientSession, base_url: str, content: str) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": content}]}
    async with session.post(f"{base_url}/chat/completions", json=body) as response:
        response.raise_for_status()
        reply = await response.json()
    return str(reply["choices"][0]["message"]["content"])


def demonstrations(seed: int, size: int, hasty_share: float = 0.55, max_letters: int = 8) -> list[Row]:
    """Return answers to questions, every second of which contains the answer without its last letter as a wrong one.

    As in `tiny`, the annotator is often in a hurry and leaves the last letter out, in `hasty_share` of all.
    """
    generator = random.Random(seed)
    items = reasoning_gym.create_dataset(
        "spell_backward", seed=seed, size=size, min_word_len=3, max_word_len=max_letters
    )
    rows = []
    for index, item in enumerate(items):
        right = item["answer"]
        question = item["question"] if index % 2 else f"{item['question']} (not {right[:-1]})"
        word = right[:-1] if generator.random() < hasty_share else right
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"answer: {word}"}]
        rows.append({"messages": messages})
    return rows
