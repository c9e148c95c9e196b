"""A user's file with agents and executors; what they do is the row's `answer`."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import time

import aiohttp
from openai import AsyncOpenAI, OpenAI


async def agent(row, base_url, api_key, price=0.0):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return await globals()[row["answer"]](row, client, price)


def blocking_agent(row, base_url, api_key):
    """Not async: one that blocks its process holds up no other."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        said = client.chat.completions.create(model="policy", messages=row["prompt"])
    return len(said.choices[0].message.content)


def ask(client, row, text=None):
    messages = row["prompt"] if text is None else [{"role": "user", "content": text}]
    return client.chat.completions.create(model="policy", messages=messages)


async def fine(row, client, price):
    said = await ask(client, row)
    return {"reward": len(said.choices[0].message.content) - price}


async def delegates(row, client, price):
    """Two sub-agents side by side, and then a last reply."""
    await asyncio.gather(ask(client, row, "x"), ask(client, row, "y"))
    await ask(client, row)
    return 1


async def nothing(row, client, price):
    return 1.0


async def raises(row, client, price):
    await ask(client, row)
    raise KeyError("no such move")


async def slow(row, client, price):
    await asyncio.gather(ask(client, row, "slow"), ask(client, row))
    return 1


async def hangs(row, client, price):
    await ask(client, row)
    time.sleep(1000)


async def dies(row, client, price):
    os._exit(4)


async def leaves(row, client, price):
    """A process of its own, and a request that is still waited for."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    row["left"] = asyncio.create_task(ask(client, row, "wait"))
    await ask(client, row)
    return 0.5


async def returns_text(row, client, price):
    await ask(client, row)
    return "good"


async def returns_nothing(row, client, price):
    await ask(client, row)


async def returns_infinity(row, client, price):
    await ask(client, row)
    return float("inf")


async def returns_another_key(row, client, price):
    await ask(client, row)
    return {"reward": 1.0, "points": 1.0}


async def executor(engine, row):
    return await globals()[f"executor_{row['answer']}"](engine, row)


async def executor_fine(engine, row):
    prompt = await engine.encode(row["prompt"])
    reply = await engine.generate(prompt)
    assert await engine.decode(reply.token_ids) == reply.text
    after = [*prompt, *reply.token_ids, *await engine.tokenize("b")]
    await engine.generate(after, max_tokens=1)
    return 0.25


async def executor_chooses(engine, row):
    """Several answers side by side, of which the longest trains."""
    prompt = await engine.encode(row["prompt"])
    replies = await asyncio.gather(*(engine.generate(prompt, stop=["b"]) for _ in range(3)))
    best = max(replies, key=lambda reply: reply.number)
    return {"reward": 1.0, "sequences": [[prompt, best]]}


async def executor_invents(engine, row):
    prompt = await engine.encode(row["prompt"])
    reply = await engine.generate(prompt)
    reply.token_ids[0] += 1
    return {"reward": 1.0, "sequences": [[prompt, reply]]}


async def executor_asks_too_much(engine, row):
    prompt = await engine.encode(row["prompt"])
    refused = []
    for _ in range(6):
        try:
            await engine.generate(prompt)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) == 2, refused
    assert "all of the 4 calls" in refused[0]
    return 0.0


async def executor_writes_nonsense(engine, row):
    engine._connection.sendall(b'{"ask": "generate"}\n')
    await asyncio.sleep(1000)


async def executor_nothing(engine, row):
    return 1.0


async def agent_elsewhere(row, base_url, api_key, certificate):
    """As from a container: with the certificate alone."""
    assert base_url.startswith("https://localhost:")
    async with aiohttp.ClientSession(headers={"x-api-key": api_key}) as session:
        body = {"model": "m", "max_tokens": 9, "messages": row["prompt"]}
        trusted = ssl.create_default_context(cadata=certificate)
        async with session.post(f"{base_url}/messages", json=body, ssl=trusted) as response:
            response.raise_for_status()
            return float((await response.json())["content"][0]["text"] == "abc")
