"""The example of an OpenEnv environment in the docs, against a server with its protocol."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from rlhf_core.config.environments.environments import FunctionEnvironment
from rlhf_core.environments import Feedback, Reply
from rlhf_core.environments.function import FunctionHost
from rlhf_core.errors import EpisodeError
from tests.rlhf_core.environments.resource_server import served

pytestmark = pytest.mark.parts

PAGE = Path(__file__).parents[3] / "docs/reference/other-frameworks.md"
NUMBER = 7


async def session(request: web.Request) -> web.StreamResponse:
    """The number guessing game of one connection, as OpenEnv's server answers."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)

    async def tell(text: str, reward: float | None, *, done: bool = False) -> None:
        data = {"observation": {"text": text}, "reward": reward, "done": done}
        await socket.send_json({"type": "observation", "data": data})

    async for message in socket:
        assert message.type is WSMsgType.TEXT
        match json.loads(message.data):
            case {"type": "reset", "data": {"seed": int()}}:
                await tell("Guess.", None)
            case {"type": "step", "data": {"message": said}} if said.isdecimal():
                right = int(said) == NUMBER
                await tell("Right." if right else "Wrong.", 1.0 if right else -0.5, done=right)
            case _:
                await socket.send_json({"type": "error", "data": {"message": "no action", "code": "EXECUTION_ERROR"}})
    return socket


@pytest.fixture
def environments(tmp_path: Path) -> Iterator[FunctionHost]:
    found = re.search(r"^```python\n(# openenv_game\.py\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    file = tmp_path / "openenv_game.py"
    file.write_text(found[1])
    with served("GET", "/ws", session) as url:
        config = FunctionEnvironment(type="function", path=file.name, function="Game", options={"url": f"{url}/ws"})
        with closing(FunctionHost(config, file)) as opened:
            yield opened


def test_episodes_are_sessions_of_the_server(environments: FunctionHost) -> None:
    async def play() -> list[Any]:
        with closing(environments.new()) as first, closing(environments.new()) as second:
            said = [await first.reset({}, 1), await second.reset({}, 2)]
            said += [await first.step(Reply("3", "3")), await first.step(Reply("7", "7"))]
            with pytest.raises(EpisodeError, match="RuntimeError: no action"):
                await second.step(Reply("seven", "seven"))
            return said

    asked = [{"role": "user", "content": "Guess."}]
    assert asyncio.run(play()) == [
        asked, asked,
        Feedback([{"role": "user", "content": "Wrong."}], -0.5),
        Feedback([{"role": "user", "content": "Right."}], 1.0, done=True),
    ]  # fmt: skip
