"""A reward server, over a real connection on the loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhf_core.config.rewards.rewards import HTTPReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards import Reward, build_text_reward
from tests.rlhf_core.stages.context import LocalContext
from tests.services import free_ports, http_server

Answer = tuple[int, Any]  # status, body


class Server:
    """Answers what `answer` says of a request; keeps the requests and their headers."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = lambda request: (200, {"rewards": []})
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ours.requests.append(request)
                ours.headers.append(dict(self.headers))
                status, body = ours.answer(request)
                payload = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *arguments: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def reward(server: Server, tmp_path: Any) -> Iterator[Callable[..., Reward]]:
    made: list[Reward] = []

    def build(**settings: Any) -> Reward:
        settings = {"url": server.url, **settings} if "url_variable" not in settings else settings
        made.append(build_text_reward(HTTPReward(type="http", **settings), LocalContext(tmp_path)))
        return made[-1]

    yield build
    for one in made:
        one.close()


def unused_url() -> str:
    """Where no server is."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


def test_it_is_sent_completions_prompts_and_rows_and_gives_rewards_scores_and_metrics(
    server: Server, reward: Callable[..., Reward]
) -> None:
    server.answer = lambda request: (
        200,
        {
            "rewards": [len(c) for c in request["completions"]],
            "scores": [row["s"] for row in request["rows"]],
            "extra": {"asked": [len(p) for p in request["prompts"]]},
        },
    )
    result = reward()(["a", "bcd"], ["p", "qq"], [{"s": 0.0}, {"s": 1.0}])
    assert (result.rewards, result.scores, result.extra) == ([1.0, 3.0], [0.0, 1.0], {"asked": [1.0, 2.0]})
    assert server.requests == [{"completions": ["a", "bcd"], "prompts": ["p", "qq"], "rows": [{"s": 0.0}, {"s": 1.0}]}]


def test_batches_are_sent_at_once_and_answered_in_order(server: Server, reward: Callable[..., Reward]) -> None:
    both_are_there = threading.Barrier(2, timeout=30)

    def answer(request: dict[str, Any]) -> Answer:
        both_are_there.wait()
        return 200, {"rewards": [float(c) for c in request["completions"]]}

    server.answer = answer
    result = reward(batch_size=2)(["1", "2", "3"], [""] * 3, [{}] * 3)
    assert (result.rewards, result.scores, result.extra) == ([1.0, 2.0, 3.0], [None] * 3, {})
    assert sorted(len(request["rows"]) for request in server.requests) == [1, 2]


def test_batches_of_a_dead_server_go_to_the_others_and_it_is_counted(
    server: Server, reward: Callable[..., Reward]
) -> None:
    server.answer = lambda request: (200, {"rewards": [float(c) for c in request["completions"]]})
    texts = [str(number) for number in range(20)]
    spread = reward(url=None, urls=(unused_url(), server.url), batch_size=1, attempts=1)
    result = spread(texts, texts, [{}] * 20)
    assert result.rewards == [float(text) for text in texts]
    assert result.extra == {"unreachable_servers": [1.0] * 20}
    assert len(server.requests) == 20


def test_a_busy_server_leaves_a_batch_to_the_next_one(
    server: Server, reward: Callable[..., Reward], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = iter([503, 200])
    server.answer = lambda request: (next(statuses), {"rewards": [1.0]})
    monkeypatch.setenv("JUDGES", f"{server.url}?a {server.url}?b")
    assert reward(url_variable="JUDGES", attempts=1)(["a"], ["p"], [{}]).rewards == [1.0]
    server.answer = lambda request: (500, b"broken")
    with pytest.raises(RewardError, match=r"reward server of JUDGES \(URL 2 of 2\) answered with status 500: broken"):
        reward(url_variable="JUDGES", attempts=1)(["a"], ["p"], [{}])


def test_the_form_of_openrlhf(server: Server, reward: Callable[..., Reward]) -> None:
    server.answer = lambda request: (
        200,
        {"rewards": [0.5, 2.0], "scores": [0.5, 1.0], "extra_logs": {"dummy_scores": [0.5, 2.0]}},
    )
    query = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>{{ completion }}"
    rows = [{"answer": "4", "prompt": [{"role": "user", "content": "2+2?"}]}, {}]
    result = reward(form="openrlhf", query=query)(["4", "b"], ["2+2?", "q"], rows)
    assert (result.rewards, result.scores) == ([0.5, 2.0], [0.5, 1.0])
    assert result.extra == {"dummy_scores": [0.5, 2.0]}
    assert server.requests == [
        {
            "query": ["<user>2+2?<assistant>4", "<user>q<assistant>b"],
            "prompts": ["2+2?", "q"],
            "labels": ["4", ""],
        }
    ]


@pytest.mark.parametrize(("given", "scores"), [([3.0, 0.5], [None, None]), ([1.0, 0.5], [1.0, 0.5])])
def test_rewards_that_a_server_of_openrlhf_repeats_as_scores(
    server: Server, reward: Callable[..., Reward], given: list[float], scores: list[float | None]
) -> None:
    server.answer = lambda request: (200, {"rewards": given, "scores": given, "extra_logs": {}})
    assert reward(form="openrlhf")(["a", "b"], ["p", "p"], [{}, {}]).scores == scores


def test_an_answer_that_drips_is_late(reward: Callable[..., Reward]) -> None:
    class Dripping(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with suppress(OSError):  # the client has left
                for _ in range(1000):
                    self.wfile.write(b" ")
                    time.sleep(0.02)

        def log_message(self, *arguments: Any) -> None: ...

    with http_server(Dripping) as url, pytest.raises(RewardError, match=r"did not answer within 0\.2 s"):
        reward(url=url, timeout_seconds=0.2)(["a"], ["p"], [{}])


def test_a_redirect_is_not_followed(server: Server, reward: Callable[..., Reward]) -> None:
    server.answer = lambda request: (307, b"")
    with pytest.raises(RewardError, match=r"status 307 \(a redirect, which is not followed"):
        reward()(["a"], ["p"], [{}])
    assert len(server.requests) == 1


def test_a_busy_or_broken_server_is_asked_again(server: Server, reward: Callable[..., Reward]) -> None:
    statuses = iter([503, 429, 408, 200])
    server.answer = lambda request: (next(statuses), {"rewards": [1.0]})
    assert reward()(["a"], ["p"], [{}]).rewards == [1.0]
    assert len(server.requests) == 4


def test_it_is_asked_no_more_often_than_said(server: Server, reward: Callable[..., Reward]) -> None:
    server.answer = lambda request: (500, b"out of memory")
    with pytest.raises(RewardError, match="answered with status 500: out of memory"):
        reward(attempts=2)(["a"], ["p"], [{}])
    assert len(server.requests) == 2


def test_a_refusal_is_not_repeated(server: Server, reward: Callable[..., Reward]) -> None:
    server.answer = lambda request: (401, b"who are you?")
    with pytest.raises(RewardError, match=r"127.0.0.1.* answered with status 401: who are you\?"):
        reward()(["a"], ["p"], [{}])
    assert len(server.requests) == 1


def test_a_late_answer_is_an_error_at_once(server: Server, reward: Callable[..., Reward]) -> None:
    def late(request: dict[str, Any]) -> Answer:
        time.sleep(1.0)
        return 200, {"rewards": [1.0]}

    server.answer = late
    with pytest.raises(RewardError, match=r"did not answer within 0\.2 s \(ReadTimeout\)"):
        reward(timeout_seconds=0.2)(["a"], ["p"], [{}])
    assert len(server.requests) == 1


def test_a_server_that_is_not_there_is_named(reward: Callable[..., Reward]) -> None:
    url = unused_url()
    with pytest.raises(RewardError, match=f"{url} cannot be reached: ConnectError"):
        reward(url=url, attempts=2)(["a"], ["p"], [{}])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "did not answer with JSON: '<html>'"),
        ([1.0, 2.0], "expected a mapping with `rewards`"),
        ({"reward": [1.0, 2.0]}, "expected a mapping with `rewards`"),
        (
            {"rewards": [1.0, 2.0], "score": [1.0, 1.0]},
            "expected a mapping with `rewards` and, optionally, `scores` and `extra`",
        ),
        ({"rewards": [1.0]}, "1 values of `reward` for 2 completions"),
        ({"rewards": 1.0}, "1.0 values of `reward` for 2 completions"),
        ({"rewards": [1.0, 2.0], "scores": [1.0]}, "1 values of `score` for 2 completions"),
        ({"rewards": [1.0, 2.0], "extra": {"a": [1.0]}}, "1 values of `a` for 2 completions"),
        (b'{"rewards": [1.0, NaN]}', "completion 1: the reward is nan, expected a finite number"),
        ({"rewards": [1.0, None]}, "completion 1: the reward is None"),
        ({"rewards": [1.0, 2.0], "scores": [1.0, 1.5]}, "completion 1: the score is 1.5, expected 0 to 1"),
    ],
)
def test_everything_wrong_is_an_error(server: Server, reward: Callable[..., Reward], body: Any, message: str) -> None:
    server.answer = lambda request: (200, body)
    with pytest.raises(RewardError) as raised:
        reward()(["a", "b"], ["p", "p"], [{}, {}])
    assert message in str(raised.value)


def test_url_and_header_come_from_the_environment_and_stay_out_of_errors(
    server: Server, reward: Callable[..., Reward], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_URL", f"{server.url}?key=secret-1")
    monkeypatch.setenv("ALIGNMENT_HEADER_JUDGE", "Authorization: Bearer secret-2")
    server.answer = lambda request: (404, b"no such judge")
    with pytest.raises(RewardError) as raised:
        reward(url_variable="JUDGE_URL", header_variable="ALIGNMENT_HEADER_JUDGE")(["a"], ["p"], [{}])
    assert str(raised.value) == "reward server of JUDGE_URL answered with status 404: no such judge"
    assert raised.value.__cause__ is None
    assert server.headers[0]["Authorization"] == "Bearer secret-2"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("url_variable", None, "the environment variable ALIGNMENT_HEADER_JUDGE, which the recipe names, is not set"),
        ("url_variable", "judge.example:80", "must begin with http:// or https://"),
        ("header_variable", "Bearer abc", "must be a header such as `Authorization: Bearer abc`"),
    ],
)
def test_a_variable_that_is_not_what_it_should_be_is_named_before_anything_runs(
    reward: Callable[..., Reward], monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None, message: str
) -> None:
    monkeypatch.delenv("ALIGNMENT_HEADER_JUDGE", raising=False)
    if value is not None:
        monkeypatch.setenv("ALIGNMENT_HEADER_JUDGE", value)
    with pytest.raises(RewardError, match="ALIGNMENT_HEADER_JUDGE") as raised:
        reward(**{variable: "ALIGNMENT_HEADER_JUDGE"})
    assert message in str(raised.value)
