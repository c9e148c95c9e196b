"""Reward servers queried by `plan` and `run` before any job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.prepare import check
from tests.rlhf_core.preflight.test_images import GRPO, seeing
from tests.rlhf_core.recipes import QUESTION, put, write
from tests.services import free_ports, http_server

pytestmark = pytest.mark.parts

HTML = b"<html><body>Sign in</body></html>"


@contextmanager
def reward_server(body: bytes, status: int = 200, seconds: float = 0.0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL, and the requests that it has got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(seconds)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None: ...

    with http_server(Handler) as url:
        yield f"{url}/score", requests


def asked(folder: Path, repository: ArtifactRepository | None = None, **server: Any) -> list[str]:
    reward = {"type": "http", **server}
    recipe = write(folder, put("rl", "ppo", "rewards", value={"mine": reward, "preference": {"type": "reward_model"}}))
    return check(recipe, []).ask_servers(repository)


def test_a_server_that_gives_rewards_is_asked_once_with_a_row_of_the_dataset(tmp_path: Path) -> None:
    with reward_server(b'{"rewards": [0.5]}') as (url, requests):
        assert asked(tmp_path, url=url) == []
    (request,) = requests
    assert request["completions"] == ["yes"]
    assert request["prompts"] == [QUESTION]
    assert request["rows"][0]["answer"] == "four"


def test_a_row_whose_images_are_not_read_yet_is_not_sent(tmp_path: Path) -> None:
    with reward_server(b'{"rewards": [0.5]}') as (url, requests):
        rewards = {"mine": {"type": "http", "url": url}}
        change = seeing(put("rl", "grpo", value={**GRPO, "rewards": rewards}))
        assert check(write(tmp_path, change), []).ask_servers(None) == []
    assert requests == []


@pytest.mark.parametrize(
    ("body", "status", "seconds", "says"),
    [
        (HTML, 200, 0.0, "did not answer with JSON: '<html><body>Sign in"),
        (b'{"reward": 1.0}', 200, 0.0, "expected a mapping with `rewards`"),
        (b'{"rewards": [1.0, 2.0]}', 200, 0.0, "2 values of `reward` for 1 completions"),
        (b'{"rewards": [null]}', 200, 0.0, "reward"),
        (b"who are you?", 401, 0.0, "answered with status 401: who are you?"),
        (b'{"rewards": [0.5]}', 200, 0.6, "did not answer within 0.3 s"),
    ],
)
def test_any_other_answer_is_refused(tmp_path: Path, body: bytes, status: int, seconds: float, says: str) -> None:
    with reward_server(body, status, seconds) as (url, _), pytest.raises(RecipeError) as caught:
        asked(tmp_path, url=url, timeout_seconds=0.3 if seconds else 60)
    assert str(caught.value).startswith(f"rl.ppo.rewards.mine: reward server {url}")
    assert says in str(caught.value)


def test_each_of_several_servers_is_asked(tmp_path: Path) -> None:
    with (
        reward_server(b'{"rewards": [0.5]}') as (good, requests),
        reward_server(HTML) as (bad, _),
        pytest.raises(RecipeError, match=bad),
    ):
        asked(tmp_path, urls=[good, bad])
    assert len(requests) == 1


def test_a_server_that_may_answer_later_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    (note,) = asked(tmp_path, url=f"http://127.0.0.1:{port}")
    assert note.startswith(f"rl.ppo.rewards.mine: reward server http://127.0.0.1:{port} cannot be reached")
    assert note.endswith("the job will ask it again")
    with reward_server(b"loading", 503) as (url, requests):
        (note,) = asked(tmp_path, url=url)
        assert "answered with status 503: loading; the job will ask it again" in note
    assert len(requests) == 1
    monkeypatch.delenv("MY_SERVER", raising=False)
    (note,) = asked(tmp_path, url_variable="MY_SERVER")
    assert note.startswith("rl.ppo.rewards.mine is not asked before the job: the environment variable MY_SERVER")


def test_of_a_result_that_the_store_has_no_server_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = ArtifactRepository(LocalStore(tmp_path / "store"))
    monkeypatch.setattr(ArtifactRepository, "manifest", lambda self, ref: "there")
    with reward_server(HTML) as (url, requests):
        assert asked(tmp_path, repository, url=url) == []
    assert requests == []
