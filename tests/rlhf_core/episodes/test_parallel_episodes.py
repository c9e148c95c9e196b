"""Episodes with processes of their own: no more are played at a time than the recipe says, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.chat.templates import SHIPPED
from rlhf_core.config.engines.rollout import SamplingConfig, VllmEngineConfig
from rlhf_core.config.environments.environments import ByRow, ExecutorEnvironment, FunctionEnvironment, ToolsEnvironment
from rlhf_core.config.environments.tools import FunctionTool
from rlhf_core.data.prompts import to_prompts
from rlhf_core.environments import EnvironmentHost, rows_to_play
from rlhf_core.environments.agents.executor import ExecutorHost
from rlhf_core.environments.by_row import HostByRow
from rlhf_core.environments.function import FunctionHost, FunctionTools
from rlhf_core.environments.tools.tools import ToolHost
from rlhf_core.episodes.rollouter import Rollouter, Start
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.rollout.tool_calls import ParsedReply
from rlhf_core.types import Trajectory
from tests.rlhf_core.chat.families import byte_level

pytestmark = pytest.mark.parts

CHATML = byte_level(SHIPPED["chatml"].text)
EPISODES, AT_A_TIME = 5, 2
# Each process notes how many there are when it begins, and lives for a while, in which others could begin.
CODE = """
import os, time

def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # a zombie was killed, and is not reaped yet
    except (FileNotFoundError, ProcessLookupError):
        return False

def noted(folder, seconds=0.3):
    open(os.path.join(folder, f"process-{os.getpid()}"), "w").close()
    alive = [n for n in os.listdir(folder) if n.startswith("process-") and is_alive(n[8:])]
    with open(os.path.join(folder, "seen"), "a") as file:
        file.write(f"{len(alive)}\\n")
    time.sleep(seconds)

class Environment:
    def __init__(self, folder, seconds=0.3): noted(folder, seconds)
    def step(self, reply): return {"reward": 1.0, "done": True}

class Tools:
    def __init__(self, folder): noted(folder)
    def look(self) -> str:
        "What there is."
        return "seen"

async def run(engine, row, folder, seconds=0.3):
    noted(folder, seconds)
    await engine.generate(await engine.encode(row["prompt"]))
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return path


class NoCalls:
    """As vLLM's parsers, which take seconds to import."""

    async def parse(self, reply: str, tools: Sequence[Any] | None = None) -> ParsedReply:
        return ParsedReply(reply, [])

    def close(self) -> None: ...


def of_code(kind: str, file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    options = {"folder": str(file.parent), **settings.pop("options", {})}
    return {"type": kind, "path": file.name, "options": options, "parallel_episodes": AT_A_TIME, **settings}


def of_function(file: Path, **settings: Any) -> EnvironmentHost:
    given = of_code("function", file, settings)
    return FunctionHost(FunctionEnvironment.model_validate(given), file)


def of_tools(file: Path) -> EnvironmentHost:
    tool = {"type": "function", "path": file.name, "function": "Tools", "options": {"folder": str(file.parent)}}
    given = {"type": "tools", "tools": {"own": tool}, "parser": "any", "parallel_episodes": AT_A_TIME}
    config = ToolsEnvironment.model_validate(given)
    own = config.tools["own"]
    assert isinstance(own, FunctionTool)
    parser: Any = NoCalls()
    opened = ExitStack()
    toolset = opened.enter_context(closing(FunctionTools(own, file)))
    return ToolHost(config, [toolset], parser, opened)


def of_executor(file: Path, **settings: Any) -> EnvironmentHost:
    given = of_code("executor", file, settings)
    return ExecutorHost(ExecutorEnvironment.model_validate(given), file)


def by_row(file: Path) -> EnvironmentHost:
    choice = {"type": "function", "path": file.name}
    config = ByRow.model_validate({"type": "by_row", "choices": {"hosted": choice, "plain": {"type": "single_turn"}}})
    opened = ExitStack()
    return HostByRow(config, {"hosted": opened.enter_context(closing(of_function(file)))}, opened)


def played(environments: EnvironmentHost, *, repeatable: bool, episodes: int = EPISODES) -> list[Trajectory]:
    rows = [
        {"id": str(n), "prompt": [{"role": "user", "content": "a?"}], "environment": "hosted"} for n in range(episodes)
    ]
    end = CHATML.convert_tokens_to_ids("<|im_end|>")
    engines = InlineEngines(ScriptedEngine(lambda prompt, seed: [end], max_length=4000))
    config = VllmEngineConfig(max_length=4000, repeatable=repeatable)
    prompts = to_prompts(list(rows_to_play(rows, environments)), CHATML, max_tokens=3000)
    starts = [Start(prompt, lambda turn: turn) for prompt in prompts]
    return Rollouter(engines, CHATML, config, environments).play(starts, SamplingConfig(max_tokens=8))


@pytest.mark.parametrize(
    ("made", "repeatable"),
    [(of_function, False), (of_function, True), (of_tools, False), (by_row, True), (of_executor, False)],
)
def test_no_more_are_played_at_a_time(made: Callable[[Path], EnvironmentHost], repeatable: bool, file: Path) -> None:
    with closing(made(file)) as environments:
        trajectories = played(environments, repeatable=repeatable)
    assert [trajectory.prompt.id for trajectory in trajectories] == [str(n) for n in range(EPISODES)]
    seen = [int(line) for line in (file.parent / "seen").read_text().split()]
    assert (len(seen), max(seen)) == (EPISODES, AT_A_TIME)


@pytest.mark.endurance("rl-matrix")
@pytest.mark.parametrize(("made", "limit"), [(of_function, "episode_seconds"), (of_executor, "timeout_seconds")])
def test_waiting_for_others_does_not_count_as_time_of_an_episode(
    made: Callable[..., EnvironmentHost], limit: str, file: Path
) -> None:
    with closing(made(file, parallel_episodes=1, options={"seconds": 1.2}, **{limit: 3})) as environments:
        assert len(played(environments, repeatable=False, episodes=3)) == 3  # the last one begins after 2.4 s
