"""The page of services: what it says of each, how to sign in, and that no secret is in it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.system.network import listening
from tests.deployments.ui.served import browsing, served

pytestmark = pytest.mark.parts

LOGIN, TOKEN = "alignment:hush-prefect", "hush-ray"
EXPECTED = {
    "/api/admin/version": f"Basic {b64encode(LOGIN.encode()).decode()}",
    "/api/jobs/": f"Bearer {TOKEN}",
}


async def answer(request: web.Request) -> web.Response:
    return web.Response(status=200 if request.headers.get("Authorization") == EXPECTED[request.path] else 401)


@pytest.fixture
def server() -> Iterator[str]:
    """A Prefect server and a Ray dashboard at one address, which ask for their logins."""
    app = web.Application()
    app.add_routes([web.get(path, answer) for path in EXPECTED])
    with listening("127.0.0.1", 0) as listener, served(app, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def browser(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    for name in ("RAY_ADDRESS", "PREFECT_API_KEY", "PREFECT_UI_URL"):
        monkeypatch.delenv(name, raising=False)
    variables = {
        "ALIGNMENT_STACK_DIR": str(tmp_path / "stack"), "PREFECT_API_URL": f"{server}/api",
        "PREFECT_API_AUTH_STRING": LOGIN, "RAY_API_SERVER_ADDRESS": server, "RAY_AUTH_TOKEN": TOKEN,
        "AWS_SECRET_ACCESS_KEY": "hush-aws",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with browsing(LocalStore(tmp_path / "store"), tmp_path / "cache") as client:
        yield client


def states(page: str) -> dict[str, str]:
    headings = re.findall(r'<h2>(?:<a href="[^"]*"[^>]*>)?(\w+)(?:</a>)? <span class="\w+">([^<]*)</span>', page)
    return dict(headings)


def test_services_that_answer_have_links_and_the_commands_that_print_their_logins(
    browser: httpx.Client, server: str
) -> None:
    page = browser.get("/services").text
    assert states(page) == {"Prefect": "answers", "Ray": "answers", "Store": "answers"}
    assert re.findall(r'<h2><a href="([^"]*)"', page) == [server, server]
    assert re.findall(r"<td><code>(echo[^<]*)</code>", page) == [
        "echo &#34;$PREFECT_API_AUTH_STRING&#34;", "echo &#34;$RAY_AUTH_TOKEN&#34;"
    ]  # fmt: skip
    assert "hush" not in page
    assert '<a href="/services">' in browser.get("/").text


def test_the_logins_of_the_local_stack_are_printed_by_the_command(
    browser: httpx.Client, server: str, tmp_path: Path
) -> None:
    stack = tmp_path / "stack"
    stack.mkdir()
    (stack / "stack.env").write_text(f"RAY_API_SERVER_ADDRESS={server}\nRAY_AUTH_TOKEN={TOKEN}\n")
    page = browser.get("/services").text
    assert "<code>alignment env | grep RAY_AUTH_TOKEN</code>" in page
    assert page.count("started by alignment up") == 1
    assert "echo &#34;$PREFECT_API_AUTH_STRING&#34;" in page


def test_a_service_that_refuses_is_away_or_missing_is_said_without_its_login(
    browser: httpx.Client, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{server.replace('//', '//ann:hush@')}/api")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "alignment:hush-wrong")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "127.0.0.1:6379")
    page = browser.get("/services").text
    assert states(page) == {"Prefect": "does not answer", "Ray": "does not answer", "Store": "answers"}
    assert "it answers with status 401" in page
    assert "this is no dashboard" in page
    assert (f'href="{server}"' in page, "hush" in page) == (True, False)
    monkeypatch.delenv("PREFECT_API_URL")
    assert states(browser.get("/services").text)["Prefect"] == "not configured"
