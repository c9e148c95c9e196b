"""Episodes at a resource server of NeMo Gym: what it is asked, and what a server can do wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
from aiohttp import web

from rlhf_core.chat.templates import SHIPPED
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.config.environments.environments import NemoGymEnvironment
from rlhf_core.data.prompts import to_prompts
from rlhf_core.environments import Feedback, Reply, rows_to_play
from rlhf_core.environments.nemo_gym.environment import NemoGymHost
from rlhf_core.environments.nemo_gym.responses import ResponseItems
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.errors import EpisodeError, RewardError, StageError
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.rollout.tool_calls import ParsedReply, ToolCall
from tests.rlhf_core.chat.families import byte_level
from tests.rlhf_core.environments.resource_server import TOOLS, ResourceServer, resource_server, row

pytestmark = pytest.mark.endurance("architectures")

CHATML = byte_level(SHIPPED["chatml"].text)
SECONDS = 0.5  # longest wait for an answer, where a server does not answer


class Hermes:
    """As vLLM's parser of the format hermes, which takes seconds to import."""

    async def parse(self, reply: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ParsedReply | None:
        assert tools == row()["tools"]
        content, *written = reply.split("<tool_call>")
        try:
            calls = [json.loads(each.removesuffix("</tool_call>")) for each in written]
        except ValueError:
            return None
        return ParsedReply(content, [ToolCall(call["name"], call["arguments"]) for call in calls])


@pytest.fixture
def server() -> Iterator[ResourceServer]:
    with resource_server() as running:
        yield running


@pytest.fixture
def environments(server: ResourceServer) -> Callable[..., NemoGymHost]:
    def made(**settings: Any) -> NemoGymHost:
        given = {"type": "nemo_gym", "parser": "hermes", "timeout_seconds": SECONDS, "attempts": 1, **settings}
        if "url_variable" not in given:
            given.setdefault("url", server.url)
        config = NemoGymEnvironment.model_validate(given)
        return NemoGymHost(config, Hermes() if config.parser else None, ExitStack())  # type: ignore[arg-type]

    return made


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(
    environments: NemoGymHost, *replies: str | Reply, of: Mapping[str, Any] | None = None
) -> tuple[list[Feedback], Any]:
    """What each reply is answered by, and the reward."""

    async def play() -> tuple[list[Feedback], Any]:
        given = row(start=1, expected=3) if of is None else of
        with closing(environments.of_row(given).new()) as episode:
            await episode.reset(given, 0)
            told = [await episode.step(Reply(each, each) if isinstance(each, str) else each) for each in replies]
            return told, await episode.finish()

    return asyncio.run(play())


def test_an_episode_is_a_session_and_its_end_is_verified(
    server: ResourceServer, environments: Callable[..., NemoGymHost]
) -> None:
    (first, second, last), reward = played(
        environments(), f"<think>two</think>Let me. {call('add', count=2)}", call("count") + call("cuont"), "It is 3."
    )
    assert reward == 1.0
    assert first == Feedback(
        [{"role": "tool", "name": "add", "content": '{"success": true}'}], metrics={"tool_calls": 1}
    )
    assert [message["content"] for message in second.messages] == [
        '{"count": 3}', "Error: there is no tool 'cuont'; there are add, count",
    ]  # fmt: skip
    assert (second.done, second.metrics) == (False, {"tool_calls": 2, "unknown_tools": 1})
    assert (last.messages, last.done) == ([], True)
    ((paths, bodies),) = (zip(*asked, strict=True) for asked in server.asked.values())
    assert paths == ("seed_session", "add", "count", "verify")
    source = row(start=1, expected=3)["nemo_gym"]
    assert bodies[:3] == (source, {"count": 2}, {})
    assert source["id"] == 7
    response = bodies[3].pop("response")
    assert bodies[3] == source
    assert response["tools"] == TOOLS
    assert (response["object"], response["status"]) == ("response", "completed")
    text = {"type": "output_text", "annotations": []}
    message = {"type": "message", "role": "assistant", "status": "completed"}
    assert response["output"] == [
        {"id": "rs_0", "type": "reasoning", "summary": [{"type": "summary_text", "text": "two"}]},
        {"id": "msg_1", **message, "content": [{**text, "text": "Let me."}]},
        {"id": "fc_2", "type": "function_call", "call_id": "call_2", "name": "add", "arguments": '{"count": 2}'},
        {"type": "function_call_output", "call_id": "call_2", "output": '{"success": true}'},
        {"id": "fc_4", "type": "function_call", "call_id": "call_4", "name": "count", "arguments": "{}"},
        {"id": "fc_5", "type": "function_call", "call_id": "call_5", "name": "cuont", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_4", "output": '{"count": 3}'},
        {"type": "function_call_output", "call_id": "call_5", "output": second.messages[1]["content"]},
        {"id": "msg_8", **message, "content": [{**text, "text": "It is 3."}]},
    ]


def test_what_is_verified_is_a_response_of_the_api() -> None:
    from openai.types.responses import Response

    items = ResponseItems()
    items.add_reply("<think>a</think>b", [ToolCall("add", {"count": 1})])
    read = Response.model_validate(items.response("row", {"tools": TOOLS, "tool_choice": "auto"}, was_cut=True))
    assert [type(item).__name__ for item in read.output] == [
        "ResponseReasoningItem", "ResponseOutputMessage", "ResponseFunctionToolCall",
    ]  # fmt: skip
    assert read.output_text == "b"
    assert read.incomplete_details is not None


def test_errors_of_a_tool_are_results(server: ResourceServer, environments: Callable[..., NemoGymHost]) -> None:
    async def broken(request: web.Request) -> web.Response:
        return web.json_response("KeyError('x')", status=500)

    server.handlers["count"] = broken
    (misfit, raised, unreadable), reward = played(
        environments(max_malformed_replies=1), call("add", count="2"), call("count"), "<tool_call>{"
    )
    assert (misfit.messages[0]["content"], misfit.metrics["tool_errors"]) == (
        '{"detail": "count must be an integer"}',
        1,
    )
    assert (raised.messages[0]["content"], raised.metrics["tool_errors"]) == ("\"KeyError('x')\"", 1)
    assert (unreadable.done, unreadable.metrics) == (True, {"malformed_replies": 1})
    assert reward == 0.0


def test_calls_of_the_last_reply_are_made_and_those_of_one_that_was_cut_are_not(
    server: ResourceServer, environments: Callable[..., NemoGymHost]
) -> None:
    add = call("add", count=2)
    _, reward = played(environments(), Reply(add, add, is_last=True))
    assert reward == 1.0
    (told,), reward = played(environments(), Reply(add, add, is_last=True, was_cut=True))
    assert (told, reward) == (Feedback(done=True), 0.0)
    response = list(server.asked.values())[1][-1][1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["type"] for item in response["output"]] == ["function_call"]


def rollouter(
    environments: NemoGymHost, says: Callable[[str, int], str], max_length: int = 6000, **settings: Any
) -> Rollouter:
    """says: a reply by the prompt and the number of results in it."""
    end = CHATML.convert_tokens_to_ids("<|im_end|>")

    def script(prompt: Any, seed: int | None) -> list[int]:
        text = CHATML.decode(list(prompt))
        reply = says(text, text.count("<|im_start|>tool"))
        return [*CHATML(reply, add_special_tokens=False)["input_ids"], end]

    config = VllmEngineConfig(max_length=max_length, **settings)
    return Rollouter(InlineEngines(ScriptedEngine(script, max_length=max_length)), CHATML, config, environments)


@pytest.mark.parametrize("repeatable", [True, False])
def test_fifty_episodes_side_by_side_never_meet_in_a_session(
    server: ResourceServer, environments: Callable[..., NemoGymHost], repeatable: bool
) -> None:
    """Each adds its own number twice to a start of its own; every other one expects something else."""
    server.slow = True
    own = environments(requests_per_server=7, timeout_seconds=60)
    rows = [row(f"number {n};", start=100 * n, expected=102 * n + n % 2) for n in range(1, 51)]
    prompts = to_prompts(
        [{**each, "id": str(n)} for n, each in enumerate(rows_to_play(rows, own))], CHATML, max_tokens=5000
    )

    def says(text: str, results: int) -> str:
        number = int(text.rpartition("number ")[2].partition(";")[0])
        return "done" if results == 2 else call("add", count=number)

    playing = rollouter(own, says, repeatable=repeatable)
    made = playing.play([Start(prompt, lambda turn: turn) for prompt in prompts], SamplingConfig(max_tokens=90))
    assert [each.environment_reward for each in made] == [float(n % 2 == 0) for n in range(1, 51)]
    assert {len(asked) for asked in server.asked.values()} == {4}
    assert len(server.asked) == 50
    assert 1 < server.most_at_once <= 7


def test_an_episode_without_room_for_another_reply_is_verified_too(
    server: ResourceServer, environments: Callable[..., NemoGymHost]
) -> None:
    own = environments()
    (prompt,) = to_prompts(rows_to_play([row(start=1, expected=3)], own), CHATML, max_tokens=2000)
    most = len(prompt.token_ids) + 90
    playing = rollouter(own, lambda text, results: call("add", count=2), max_length=most)
    (made,) = playing.play([Start(prompt, lambda turn: turn)], SamplingConfig(max_tokens=70))
    assert (made.turns, made.finish_reason, made.environment_reward) == (1, "length", 1.0)


async def _hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(1000)
    raise AssertionError


async def _trickles(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


async def _never_ends(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 2**20)


async def _breaks(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    raise AssertionError


def _answers(body: Any = b"", **settings: Any) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body if isinstance(body, bytes) else json.dumps(body).encode(), **settings)

    return answer


@pytest.mark.parametrize(
    ("path", "handler", "problem"),
    [
        ("seed_session", _hangs, r"resource server http://127.0.0.1:\d+, /seed_session, did not answer within 0.5 s"),
        ("add", _hangs, r"/add, did not answer within 0.5 s"),
        ("verify", _trickles, r"/verify, did not answer within 0.5 s"),
        ("add", _never_ends, r"/add, answered with more than 16 MiB"),
        ("add", _breaks, r"/add, broke the connection: ServerDisconnected"),
        ("seed_session", _answers(status=404), r"/seed_session, answered with status 404"),
        ("verify", _answers(b"KeyError", status=500), r"/verify, answered with status 500: KeyError"),
        ("add", _answers(b"down", status=502), r"/add, answered with status 502: down"),
        ("add", _answers(status=307, headers={"Location": "/verify"}), r"status 307, a redirect, which is not"),
        ("add", _answers(b"<html>log in", content_type="text/html"), r"answered with a web page: '<html>log in'"),
        ("add", _answers(b"\xff\xfe"), r"/add, did not answer with text"),
        ("seed_session", _answers(b"hello"), r"/seed_session, did not answer with JSON: 'hello'"),
        ("seed_session", _answers([]), r"/seed_session, answered '\[\]', expected a mapping"),
        ("verify", _answers(b"[" * 100_000), r"/verify, did not answer with JSON"),
        ("verify", _answers(b'{"reward": NaN}'), r"/verify, did not answer with JSON: '{\"reward\": NaN}'"),
        ("verify", _answers({"reward": True}), r"/verify, answered without a number as `reward`: '{\"reward\": true}'"),
        ("verify", _answers({"reward": "1"}), r"answered without a number as `reward`"),
        ("verify", _answers({}), r"answered without a number as `reward`"),
    ],
)  # fmt: skip
def test_what_a_server_does_wrong_fails_the_episode(
    server: ResourceServer,
    environments: Callable[..., NemoGymHost],
    path: str,
    handler: Any,
    problem: str,
) -> None:
    server.handlers[path] = handler
    with pytest.raises(EpisodeError, match=problem):
        played(environments(), call("add", count=2), "3")
    if path == "add":
        assert [name for asked in server.asked.values() for name, _ in asked] == ["seed_session"]


def test_a_reward_that_no_float_holds_fails_its_episode_alone(
    server: ResourceServer, environments: Callable[..., NemoGymHost]
) -> None:
    async def verify(request: web.Request) -> web.Response:
        body = await request.json()
        return web.Response(body=b'{"reward": 1e999}' if body["expected_count"] else b'{"reward": 0.5}')

    server.handlers["verify"] = verify
    own = environments(tolerated_failures=0.5)
    rows = rows_to_play([row("a", expected=1), row("b", expected=0)], own)
    playing = rollouter(own, lambda text, results: "no")
    starts = [Start(prompt, lambda turn: turn) for prompt in to_prompts(rows, CHATML, max_tokens=5000)]
    failed, made = playing.try_to_play(starts, SamplingConfig(max_tokens=90))
    assert "finish() returned the reward inf, expected a finite number" in str(failed)
    assert not isinstance(made, EpisodeError)
    assert made.environment_reward == 0.5


def test_only_requests_without_effect_are_sent_again(
    server: ResourceServer, environments: Callable[..., NemoGymHost]
) -> None:
    statuses = iter([503, 429, 200])
    sent = []

    async def seed(request: web.Request) -> web.Response:
        sent.append(request.path)
        return web.json_response({}, status=next(statuses), headers={"Set-Cookie": "session=s"})

    async def breaks(request: web.Request) -> web.Response:
        sent.append(request.path)
        return await _breaks(request)

    server.handlers |= {"seed_session": seed, "add": breaks}
    with pytest.raises(EpisodeError, match="/add, broke the connection"):
        played(environments(attempts=3), call("add", count=1))
    assert sent == ["/seed_session"] * 3 + ["/add"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nothing = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EpisodeError, match="/seed_session, cannot be reached: ClientConnectorError"):
            played(environments(url=nothing, attempts=2))


def test_addresses_and_headers_come_from_variables(
    server: ResourceServer, environments: Callable[..., NemoGymHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    async def seed(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({"mcp": {"url_path": "/mcp"}})

    server.handlers["seed_session"] = seed
    with pytest.raises(RewardError, match="the environment variable GYM, which the recipe names, is not set"):
        environments(url_variable="GYM")
    monkeypatch.setenv("GYM", f"{server.url}/")
    monkeypatch.setenv("ALIGNMENT_HEADER_GYM", "Authorization: Bearer abc")
    own = environments(url_variable="GYM", header_variable="ALIGNMENT_HEADER_GYM", parser=None)
    with pytest.raises(EpisodeError, match="the resource server has its tools behind MCP"):
        played(own, of=row(tools=[]))
    assert seen == ["Bearer abc"]


@pytest.mark.parametrize(
    ("given", "settings", "problem"),
    [
        ({"id": "r", "prompt": []}, {}, r"row r: it is not a row of NeMo Gym: name its request by `columns: {nemo_"),
        (row(), {"parser": None}, r"the row has tools: set the environment's `parser`"),
        (row(tools=[{"type": "function", "name": "verify"}]), {}, r"a tool `verify`, a name that the resource server"),
        (row(tools=[{"type": "function", "name": "../verify"}]), {}, r"tool name '../verify' is invalid in a URL:"),
        (row(tools=[{"type": "function", "name": "a"}] * 2), {}, r"the row has two tools `a`: rename one"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_played_are_refused_before_anything_is_sampled(
    environments: Callable[..., NemoGymHost], given: Any, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(StageError, match=problem):
        list(rows_to_play([given], environments(**settings)))
