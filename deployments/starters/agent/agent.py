"""The agent of this run: change it as you like; the stages that use it are then computed again."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Try up to three times; a right answer earns 1, and 0.2 less for each attempt before it."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [*row["prompt"]]
        for attempt in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            answer = reply.choices[0].message.content or ""
            if row["answer"].lower() in answer.lower():
                return 1.0 - 0.2 * attempt
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Wrong. Try again."}]
    return 0.0
