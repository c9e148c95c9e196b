"""The tools `bash` and `edit` in an episode's runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from rlhf_core.config.environments.environments import ToolsEnvironment
from rlhf_core.config.environments.tools import BashTool
from rlhf_core.environments.tools.runtime_tools import RuntimeTools
from rlhf_core.environments.tools.toolset import ToolResult

pytestmark = pytest.mark.parts


@pytest.fixture(scope="module")
def tools() -> Iterator[RuntimeTools]:
    with closing(RuntimeTools(BashTool(type="bash", timeout_seconds=20.0, edits=True))) as tools:
        yield tools


def results(tools: RuntimeTools, *calls: tuple[str, Any]) -> list[ToolResult]:
    async def play() -> list[ToolResult]:
        with closing(tools.new()) as episode:
            await episode.reset({"id": "row"}, 0)
            return [await episode.call(name, arguments) for name, arguments in calls]

    return asyncio.run(play())


def test_what_a_command_did_is_its_result(tools: RuntimeTools) -> None:
    assert [schema["function"]["name"] for schema in tools.schemas] == ["bash", "edit"]
    commands = ("echo a", "true", "echo b; exit 3", "yes | head -c 100000", "echo c > kept")
    first, silent, failed, long, _, edited, read = results(
        tools,
        *(("bash", {"command": command}) for command in commands),
        ("edit", {"path": "kept", "old": "c", "new": "d"}),
        ("bash", {"command": "cat kept"}),
    )
    assert (first.text, first.problem) == ("a", None)
    assert (silent.text, silent.problem) == ("[no output]", None)
    assert (failed.text, failed.problem) == ("b\n[exit status 3]", "tool_errors")
    assert long.text.endswith("y\n[there was more output]")
    assert (edited.text, read.text) == ("kept is written", "d")
    (gone,) = results(tools, ("bash", {"command": "ls"}))
    assert gone.text == "[no output]", "each episode has files of its own"


def test_a_command_that_is_stopped_says_so(tools: RuntimeTools) -> None:
    with closing(RuntimeTools(BashTool(type="bash", timeout_seconds=2.0))) as hasty:
        assert [schema["function"]["name"] for schema in hasty.schemas] == ["bash"]
        (stopped,) = results(hasty, ("bash", {"command": "echo so far; sleep 1000"}))
    assert (stopped.text, stopped.problem) == ("so far\n[stopped: it ran longer than 2 s]", "tool_errors")


@pytest.mark.parametrize("arguments", [{}, {"command": 1}, {"command": "a", "more": "b"}, "ls", None])
def test_arguments_of_another_form_are_told(tools: RuntimeTools, arguments: Any) -> None:
    (wrong,) = results(tools, ("bash", arguments))
    assert wrong == ToolResult("Error: the arguments must be {command}, all text", "wrong_arguments")


def test_episodes_with_runtimes_are_bounded() -> None:
    settings = {"type": "tools", "parser": "hermes", "tools": {"shell": {"type": "bash"}}}
    assert ToolsEnvironment.model_validate(settings).runs_per_episode
    settings["tools"] = {"python": {"type": "python"}}
    assert not ToolsEnvironment.model_validate(settings).runs_per_episode
