"""A reward model behind HTTP, in this process: its rewards are those that would train, whoever asks with it."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from aiohttp import web
from httpx import Client

from rlhf_core.errors import StageError
from rlhf_core.reward_server.app import reward_app
from rlhf_core.reward_server.settings import Serving, require_reward_model
from tests.rlhf_core.reward_server.models import in_process, reward_model

pytestmark = pytest.mark.parts

TOKEN = "secret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
QUESTIONS = [("is it good", "good"), ("is it good", "bad bad"), ("why", "x" * 30), ("why", "")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("reward-model"))


@pytest.fixture(scope="module")
def serving(folder: Path) -> Serving:
    return Serving(folder, "taste", TOKEN, "float32", 1, "ab12", tokens_per_batch=40, max_texts=500, max_bytes=100_000)


@contextmanager
def running(serving: Serving) -> Iterator[Client]:
    """A client of the application, which answers in a thread."""
    loop, app = asyncio.new_event_loop(), web.AppRunner(reward_app(serving), access_log=None, lingering_time=0.1)
    thread = Thread(target=loop.run_forever)
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def start() -> None:
            await app.setup()
            await web.SockSite(app, listener).start()

        asyncio.run_coroutine_threadsafe(start(), loop).result()
        try:
            with Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", headers=BEARER) as client:
                yield client
        finally:
            asyncio.run_coroutine_threadsafe(app.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


@pytest.fixture(scope="module")
def server(serving: Serving) -> Iterator[Client]:
    with running(serving) as client:
        yield client


def request_of(conversations: list[tuple[str, str]]) -> dict[str, Any]:
    rows = [{"id": "r", "prompt": [{"role": "user", "content": question}]} for question, _ in conversations]
    return {"completions": [c for _, c in conversations], "prompts": [q for q, _ in conversations], "rows": rows}


def test_rewards_are_those_of_training(server: Client, folder: Path) -> None:
    expected = in_process(folder, QUESTIONS)
    assert len(set(expected)) == len(QUESTIONS)
    answer = server.post("/score", json=request_of(QUESTIONS))
    assert answer.status_code == 200
    assert answer.json() == {"rewards": pytest.approx(expected, abs=1e-5)}
    without_rows = {key: value for key, value in request_of(QUESTIONS).items() if key != "rows"}
    assert server.post("/score", json=without_rows).json()["rewards"] == pytest.approx(expected, abs=1e-5)


def test_the_form_of_openrlhf_reads_texts_as_they_are(server: Client, folder: Path) -> None:
    expected = in_process(folder, QUESTIONS)
    whole = [f"<bos><user>{question}<assistant>{completion}<eos>" for question, completion in QUESTIONS]
    padded = ["<pad><pad>" + whole[0] + "<pad>", *whole[1:]]
    password = base64.b64encode(f"me:{TOKEN}".encode()).decode()  # of http://me:TOKEN@host
    sent = {"query": padded, "prompts": ["p"] * 4, "labels": [None, "a", "b", "c"]}
    answer = server.post("/get_reward", json=sent, headers={"Authorization": f"Basic {password}"}).json()
    assert answer.keys() == {"rewards", "scores", "extra_logs"}
    assert answer["rewards"] == answer["scores"] == pytest.approx(expected, abs=1e-5)
    cut = server.post("/get_reward", json={"query": [whole[0].removesuffix("<eos>")]}).json()["rewards"]
    assert cut != pytest.approx(expected[:1], abs=1e-5)


def test_requests_at_once_get_their_own_rewards(server: Client, folder: Path) -> None:
    each = [[("is it good", "good " * (n % 5)), ("n", f"bad {n}")] for n in range(30)]
    expected = in_process(folder, [conversation for request in each for conversation in request])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: server.post("/score", json=request_of(request)).json(), each))
    assert [reward for answer in answers for reward in answer["rewards"]] == pytest.approx(expected, abs=1e-5)


def test_health_needs_no_token(server: Client) -> None:
    answer = server.get("/health", headers={"Authorization": ""})
    assert answer.json() == {"ready": True, "model": "taste", "key": "ab12"}


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic secret", "Basic c2VjcmV0", f"Token {TOKEN}"])
def test_without_the_token_nothing_is_answered(server: Client, header: str) -> None:
    for path in ("/score", "/get_reward"):
        answer = server.post(path, json=request_of(QUESTIONS), headers={"Authorization": header})
        assert answer.status_code == 401
        assert TOKEN not in answer.text


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (b"<html>", 422, "`the request`: Invalid JSON"),
        ({"completions": ["a"]}, 422, "`prompts`: Field required"),
        ({"completions": [], "prompts": []}, 422, "`completions`: List should have at least 1 item"),
        ({"completions": ["a", 3], "prompts": ["p", "p"]}, 422, "`completions.1`: Input should be a valid string"),
        ({"completions": ["a"], "prompts": ["p", "q"]}, 422, "2 `prompts` for 1 completions"),
        ({"completions": ["a"], "prompts": ["p"], "rows": []}, 422, "0 `rows` for 1 completions"),
        (
            {"completions": ["a"], "prompts": ["p"], "rows": [{"prompt": [{"role": "user"}]}]},
            422,
            "`rows.0.prompt.0.content`: Field required",
        ),
        ({"completions": ["a", "b" * 80], "prompts": ["p", "p"]}, 422, "completion 1 has 85 tokens of the reward"),
        ({"completions": ["a"], "prompts": ["p"], "rows": [{"prompt": [{"role": "system", "content": "x"}]}]}, 422,
         "completion 0: the chat template refuses a conversation"),
        ({"completions": ["a"] * 501, "prompts": ["p"] * 501}, 413, "the request has 501 texts, more than 500"),
        ({"completions": ["a" * 100_000], "prompts": ["p"]}, 413, "the request is larger than 100000 bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_says_why(server: Client, request_: Any, status: int, message: str) -> None:
    content = request_ if isinstance(request_, bytes) else json.dumps(request_).encode()
    answer = server.post("/score", content=content)
    assert (answer.status_code, answer.json().keys()) == (status, {"detail"})
    assert message in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("POST", "/scores", 404), ("GET", "/score", 405)]
)
def test_what_is_not_there_says_what_is(server: Client, method: str, path: str, status: int) -> None:
    answer = server.request(method, path)
    assert answer.status_code == status
    assert answer.json() == {
        "detail": f"there is no {method} {path} here: POST /score and /get_reward give rewards, GET /health says what "
        "is served"
    }


@pytest.mark.parametrize("pause", [1000.0, 0.05])
def test_a_body_that_does_not_come_in_time(serving: Serving, pause: float) -> None:
    """A client that stops sending, and one that sends a byte now and then."""
    left = Event()

    def body() -> Iterator[bytes]:
        while not left.wait(pause):
            yield b"x"

    with running(replace(serving, silent_seconds=0.3, body_seconds=0.6)) as server:
        host, port = server.base_url.host, server.base_url.port
        assert port is not None
        with socket.create_connection((host, port)) as client, client.makefile("rb") as answer:
            head = f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: {BEARER['Authorization']}\r\nContent-Length: 999"
            client.sendall(f"{head}\r\n\r\n".encode())
            sender = Thread(target=lambda: [client.send(part) for part in body()])
            sender.start()
            try:
                assert answer.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
                assert b"the rest of the request did not come in time: send it again" in b"".join(
                    iter(answer.readline, b"")
                )
            finally:
                left.set()
                sender.join()


def test_a_text_of_nothing_is_refused(server: Client) -> None:
    answer = server.post("/get_reward", json={"query": ["<pad>"]})
    assert (answer.status_code, answer.json()) == (422, {"detail": "text 0 is empty"})


def test_a_server_that_has_too_much_to_do_says_so(serving: Serving) -> None:
    with running(replace(serving, max_waiting=3)) as busy:
        answer = busy.post("/score", json=request_of(QUESTIONS))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["detail"] == "more than 3 texts are waiting: ask again later"


def test_what_is_no_reward_model_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(StageError, match="this is not a reward model"):
        require_reward_model(tmp_path, normalize=True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "reward_std": 0.0}))
    with pytest.raises(StageError, match="give --raw to serve them as they are"):
        require_reward_model(tmp_path, normalize=True)
