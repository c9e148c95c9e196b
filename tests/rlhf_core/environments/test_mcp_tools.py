"""Tools of real MCP servers: their results, and servers that hang, die or talk nonsense."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.config.environments.tools import McpTool
from rlhf_core.environments.tools.mcp_tools import McpTools
from rlhf_core.environments.tools.toolset import EpisodeTools, ToolResult
from rlhf_core.errors import EpisodeError, RecipeError, StageError
from rlhf_core.graph.pins import pins
from rlhf_core.processes.mcp_server import look_up_tools
from tests.rlhf_core.stages.context import LocalContext
from tests.services import free_ports

pytestmark = pytest.mark.parts

FOLDER = Path(__file__).parent
FILE = "mcp_example.py"


def config(*arguments: str, **settings: Any) -> McpTool:
    return McpTool.model_validate(
        {"type": "mcp", "command": ("python", FILE, *arguments), "files": (FILE,), "start_seconds": 300.0, **settings}
    )


def context(folder: Path, **pins: str) -> LocalContext:
    return LocalContext(folder, user_files_root=FOLDER, pins=pins)


@contextmanager
def opened(tool: McpTool, folder: Path, **pins: str) -> Iterator[McpTools]:
    before = set(psutil.Process().children(recursive=True))
    with closing(McpTools.of(tool, context(folder, **pins))) as tools:
        yield tools
    assert set(psutil.Process().children(recursive=True)) <= before, "no server is left"


def played(tools: McpTools, *plays: Callable[[EpisodeTools], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Play episodes one after the other."""

    async def play() -> list[Any]:
        results = []
        for one in plays:
            with closing(tools.new()) as episode:
                await episode.reset({"id": "row"}, 0)
                results.append(await one(episode))
        return results

    return asyncio.run(play())


def calls(*names: str, **arguments: Any) -> Callable[[EpisodeTools], Coroutine[Any, Any, list[ToolResult]]]:
    async def play(episode: EpisodeTools) -> list[ToolResult]:
        return [await episode.call(name, arguments) for name in names]

    return play


def test_the_tools_of_a_server_are_called(tmp_path: Path) -> None:
    with opened(config(), tmp_path) as tools:
        functions = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
        assert [*functions] == ["put", "total", "refuse", "hang", "die", "babble", "picture", "nothing"]
        assert functions["put"]["description"] == "Puts things into the basket."
        assert functions["put"]["parameters"]["required"] == ["thing"]
        assert functions["put"]["parameters"]["properties"]["count"]["type"] == "integer"
        (results,) = played(tools, calls("put", "put", "total", thing="pen"))
        assert [(each.text, each.problem) for each in results[:2]] == [("pen", None), ("pen, pen", None)]
        assert '"costs": 6' in results[2].text

        async def others(episode: EpisodeTools) -> list[ToolResult]:
            requests = [("put", {"thing": "cup"}), ("put", {"thin": "cup"}), ("put", "cup")]
            requests += [(name, {}) for name in ("refuse", "picture", "nothing")]
            return [await episode.call(name, arguments) for name, arguments in requests]

        ((again, wrong, kind, refused, picture, empty),) = played(tools, others)
        assert again.text == "cup", "each episode has a server of its own"
        assert wrong.problem == "tool_errors"
        assert "thing" in wrong.text
        assert kind.problem == "wrong_arguments"
        assert ("refuse" in refused.text, refused.problem) == (True, "tool_errors")
        assert picture.text == "[image, which is not shown]"
        assert empty.text, "no result is an empty text"


def test_one_server_may_be_shared_and_is_started_again(tmp_path: Path) -> None:
    with opened(config(shared=True, only=("put", "die")), tmp_path) as tools:
        assert [schema["function"]["name"] for schema in tools.schemas] == ["put", "die"]
        first, second = played(tools, calls("put", thing="pen"), calls("put", thing="cup"))
        assert (first[0].text, second[0].text) == ("pen", "pen, cup")
        with pytest.raises(EpisodeError, match=f"MCP server `python {FILE}` did not answer to a call of `die`"):
            played(tools, calls("die"))
        ((after,),) = played(tools, calls("put", thing="new"))
        assert after.text == "new"


def wait_for(port: int) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens at {port}")


@pytest.mark.slow("starts a server of HTTP")
def test_a_server_with_a_url_is_asked_by_http(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = subprocess.Popen([sys.executable, str(FOLDER / FILE), "http", str(port)])
    try:
        wait_for(port)
        tool = McpTool.model_validate({"type": "mcp", "url": f"http://127.0.0.1:{port}/mcp", "only": ("put", "total")})
        with opened(tool, tmp_path) as tools:
            assert [schema["function"]["name"] for schema in tools.schemas] == ["put", "total"]
            ((first,), (second,)) = played(tools, calls("put", thing="pen"), calls("put", thing="cup"))
            assert (first.text, second.text) == ("pen", "pen, cup")  # sessions of one program
    finally:
        process.kill()
        process.wait()
    with pytest.raises(StageError, match=rf"its MCP server `http://127\.0\.0\.1:{port}/mcp` (has failed|did not)"):
        McpTools.of(tool, context(tmp_path))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "give either `command` or `url`"),
        ({"command": ("a",), "url": "http://a"}, "give either `command` or `url`"),
        ({"url": "ftp://a"}, "the URL must begin with http:// or https://"),
        ({"url": "http://a", "files": ("b.py",)}, "`files` and `variables` are of a `command`"),
        ({"command": ("a",), "header_variable": "ALIGNMENT_HEADER_A"}, "`header_variable` is sent to a `url`"),
    ],
)
def test_a_server_is_a_program_or_has_a_url(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        McpTool.model_validate({"type": "mcp", **settings})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("die", "did not answer to a call of `die`: MCPError"),
        ("hang", "did not answer to a call of `hang` within 3 s"),
        pytest.param("babble", "wrote a line that is not a message", marks=pytest.mark.endurance("mutations")),
    ],
)
def test_a_server_that_fails_fails_the_episode_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    async def play(episode: EpisodeTools) -> str:
        with pytest.raises(EpisodeError) as first:
            await episode.call(name, {})
        with pytest.raises(EpisodeError) as second:
            await episode.call("put", {"thing": "x"})
        assert str(first.value) == str(second.value), "its state is not known any more"
        return str(first.value)

    with opened(config(timeout_seconds=3.0), tmp_path) as tools:
        failed, (after,) = played(tools, play, calls("put", thing="pen"))
    assert reason in failed
    assert after.text == "pen"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("hang", "did not introduce itself within 1 s"),
        ("die", "did not introduce itself: "),
        ("babble", "wrote a line that is not a message"),
    ],
)
def test_a_server_that_does_not_start(tmp_path: Path, wrong: str, reason: str) -> None:
    tool = config(wrong, start_seconds=1.0 if wrong == "hang" else 300.0)
    with pytest.raises(StageError, match=reason):
        McpTools.of(tool, context(tmp_path))
    if wrong == "die":
        with pytest.raises(RecipeError, match="the last it wrote: it has no key: plan the run where"):
            look_up_tools(tool, FOLDER)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    tool = McpTool(type="mcp", command=("no-such-server",))
    with pytest.raises(RecipeError, match="the last it wrote: no-such-server cannot be started: No such file"):
        look_up_tools(tool, tmp_path)


def test_its_tools_are_part_of_the_key_and_compared_in_the_job(tmp_path: Path) -> None:
    found = pins(config(), {}, FOLDER)
    assert found == {f"mcp:python {FILE}": look_up_tools(config(), FOLDER)}
    more = config("more")
    assert pins(more, {}, FOLDER)[more.pin_name] != found[config().pin_name]
    with opened(config(), tmp_path, **found):
        pass
    with pytest.raises(StageError, match="has other tools here than where the run was planned"):
        McpTools.of(more, context(tmp_path, **{more.pin_name: found[config().pin_name]}))
    with pytest.raises(StageError, match="has no tool `sell`; it has put, total"):
        McpTools.of(config(only=("sell",)), context(tmp_path))


@pytest.mark.parametrize("file", ["/etc/passwd", "../server.py", "a/../../server.py"])
def test_files_are_below_the_recipe(file: str) -> None:
    with pytest.raises(ValueError, match="must be a file in the recipe's folder"):
        McpTool(type="mcp", command=("python",), files=(file,))
