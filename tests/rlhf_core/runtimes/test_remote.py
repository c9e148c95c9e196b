"""The client of a remote service of runtimes: its requests, and answers that fail."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import closing

import pytest
from aiohttp import web

from rlhf_core.config.environments.runtimes import RemoteRuntime
from rlhf_core.errors import EpisodeError
from rlhf_core.runtimes.base import Image
from rlhf_core.runtimes.remote import RemoteRuntimes
from tests.rlhf_core.runtimes.service import Service, serving

pytestmark = pytest.mark.parts


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Service, str]]:
    service = Service()
    with serving(service) as url:
        yield service, url


@pytest.fixture
def service(served: tuple[Service, str]) -> Iterator[Service]:
    service, _ = served
    service.asked.clear()
    service.headers.clear()
    yield service
    service.answers.clear()


@pytest.fixture
def url(served: tuple[Service, str]) -> str:
    return served[1]


def answer(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)


def test_what_is_sent(service: Service, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_HEADER_RUNTIMES", "Authorization: Bearer abc")
    config = RemoteRuntime(type="remote", url=url, header_variable="ALIGNMENT_HEADER_RUNTIMES")
    dockerfile = b"FROM debian\nWORKDIR /work\n"

    async def use(runtimes: RemoteRuntimes) -> str:
        runtime = await runtimes.start(Image(context={"Dockerfile": dockerfile}, variables={"A": "1"}))
        ran = await runtime.run("pwd; echo $A $B", 5.0, {"B": "2"})
        runtime.stop()
        return ran.output

    with closing(RemoteRuntimes(config)) as runtimes:
        assert asyncio.run(use(runtimes)) == "/work\n1 2\n"
    context = {"Dockerfile": base64.b64encode(dockerfile).decode()}
    assert service.asked == [
        ("POST", {"image": None, "context": context, "variables": {"A": "1"}}),
        ("run", {"command": "pwd; echo $A $B", "seconds": 5.0, "variables": {"B": "2"}}),
        ("DELETE", {}),
    ]
    assert set(service.headers) == {"Bearer abc"}


@pytest.mark.parametrize(
    ("action", "given", "problem"),
    [
        ("POST", answer("{}"), "started a runtime without naming it by `runtime`"),
        ("POST", answer("no", 503), "answered with status 503: no"),
        ("run", answer("broken", 500), "answered with status 500: broken"),
        ("run", answer("[]"), "expected a mapping"),
        ("run", answer("<html>"), "did not answer with JSON"),
        ("run", answer('{"output": "x", "status": 0, "stopped": ""}'), "without {output, status, stopped, cut}"),
        ("run", answer('{"output": "x", "status": 0, "stopped": "boredom", "cut": false}'), "without {output, status"),
        ("read", answer('{"content": "%"}'), "without base64 or null as `content`"),
        ("read", answer("{}"), "without base64 or null as `content`"),
        ("write", answer("full", 507), "answered with status 507: full"),
    ],
)
def test_an_answer_that_fails_is_an_error(
    service: Service, url: str, action: str, given: web.Response, problem: str
) -> None:
    service.answers[action] = given

    async def use(runtimes: RemoteRuntimes) -> None:
        runtime = await runtimes.start(Image())
        match action:
            case "run":
                await runtime.run("true", 5.0)
            case "read":
                await runtime.read("a")
            case _:
                await runtime.write({"a": b""})

    config = RemoteRuntime(type="remote", url=url, attempts=2)
    with closing(RemoteRuntimes(config)) as runtimes, pytest.raises(EpisodeError, match=problem):
        asyncio.run(use(runtimes))
    assert [asked for asked, _ in service.asked].count(action) == (2 if given.status == 503 else 1)


def test_a_service_that_is_not_there() -> None:
    config = RemoteRuntime(type="remote", url="http://127.0.0.1:9", attempts=1)
    with closing(RemoteRuntimes(config)) as runtimes, pytest.raises(EpisodeError, match="cannot be reached"):
        asyncio.run(runtimes.start(Image()))
