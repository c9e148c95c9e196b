"""Preflight of Harbor's tasks: the solution of one must earn more than no work at all, and a runtime has what they ask
for.
"""

from __future__ import annotations

import asyncio
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.environments.environments import AnyEnvironment, HarborEnvironment
from rlhf_core.config.environments.harbor import COLUMN, HarborTask
from rlhf_core.config.environments.runtimes import ContainerRuntime, RuntimeConfig, SandboxRuntime
from rlhf_core.data.formats import Row
from rlhf_core.data.sources.base import Located
from rlhf_core.environments.harbor_tests import graded
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.graph.graph import Node
from rlhf_core.preflight.asking import Answer, Question, ask, judged_rows
from rlhf_core.preflight.samples import Sample
from rlhf_core.runtimes import Image, RuntimeHost, open_runtimes

_SCRIPT = "solution/solve.sh"
_LONGEST_SECONDS = 60.0  # that a plan waits for a solution or for tests
_SHOWN = 300  # characters of a solution's output


def check_solutions(
    graph: Mapping[str, Node], samples: Mapping[str, Sample], root: Path, repository: ArtifactRepository | None
) -> list[str]:
    """Return a note for each environment of Harbor's tasks whose tests were not tried, or whose runtime has not what
    tasks ask for.

    samples: readable rows of each dataset. repository: nodes whose result it has are skipped.
    Raises RecipeError if the solution of a task earns no more than no work.
    """

    def questions(node: Node) -> Iterator[tuple[str, Question]]:
        for judged, name, located_rows in judged_rows(node, samples):
            if not isinstance(judged.judge, AnyEnvironment):
                continue
            tasks = [located for located in located_rows if COLUMN in located[1]]
            for below, part in judged.judge.parts().items():
                if not isinstance(part, HarborEnvironment):
                    continue
                rows = [located for located in tasks if judged.judge.of_row(located[1]) is part]
                place = ".".join(filter(None, (node.name, judged.setting, below)))
                if rows:
                    asked = f"{part.model_dump_json()} {name}"
                    yield f"runtime {asked}", partial(_equipped, place, part.runtime, rows, root)
                    if part.check_solution:
                        yield asked, partial(_compared, place, part, rows, root)

    return ask(graph, repository, questions, os.cpu_count() or 1)


def _equipped(place: str, runtime: RuntimeConfig, rows: list[Located], root: Path) -> Answer:
    """Note what tasks ask for in task.toml, and the runtime of the recipe, which decides, does not have."""
    if not isinstance(runtime, SandboxRuntime | ContainerRuntime):
        return Answer()  # a service decides
    has = {
        "memory_mb": 1024 * runtime.memory_gib,
        "storage_mb": 1024 * runtime.disk_gib if isinstance(runtime, SandboxRuntime) else math.inf,
        "allow_internet": isinstance(runtime, ContainerRuntime) and runtime.network,
        "gpus": 0,
    }
    lacking: dict[str, float] = {}
    for where, _ in rows:
        asked = tomllib.loads((root / where / "task.toml").read_text(encoding="utf-8")).get("environment", {})
        for name, most in has.items():
            if isinstance(value := asked.get(name), int | float) and value > most:
                lacking[name] = max(value, lacking.get(name, 0))
    if not lacking:
        return Answer()
    shown = ", ".join(f"{name} = {value:g}, not {has[name]:g}" for name, value in lacking.items())
    return Answer(
        note=f"{place}: of what task.toml asks for, the runtime `{runtime.type}` has less: {shown}; see its settings"
    )


def _compared(place: str, config: HarborEnvironment, rows: list[Located], root: Path) -> Answer:
    """Compare the rewards of the first task that has a solution, with it and without."""
    solved = next(((where, row) for where, row in rows if (root / where / _SCRIPT).is_file()), None)
    if solved is None:
        return Answer(note=f"{place}: no task has {_SCRIPT}, so no tests were tried")
    if not isinstance(config.runtime, SandboxRuntime):
        return Answer(note=f"{place}: no tests were tried, since the runtime `{config.runtime.type}` is of the nodes")
    where, row = solved
    try:
        with closing(open_runtimes(config.runtime)) as runtimes:
            right, wrong = asyncio.run(_rewards(runtimes, config, row, root / where / "solution"))
    except EpisodeError as error:
        return Answer(f"{place}: the task {where}: {error}")
    except StageError as error:
        return Answer(note=f"{place}: no tests were tried: {error}")
    if right > wrong:
        return Answer()
    return Answer(
        f"{place}: the tests of the task {where} give its solution {right:g}, and {wrong:g} if nothing was done: "
        "correct one of the two (`check_solution: false` if they need what only the nodes have)"
    )


async def _rewards(runtimes: RuntimeHost, config: HarborEnvironment, row: Row, solution: Path) -> tuple[float, float]:
    """Return the reward of the solution, and that of no work."""
    task = HarborTask.of(row[COLUMN])
    short = config.model_copy(update={"test_seconds": min(config.test_seconds, _LONGEST_SECONDS)})
    rewards = []
    for works in (True, False):
        runtime = await runtimes.start(Image(task.image, task.environment, task.variables))
        try:
            if works:
                files = (path for path in solution.rglob("*") if path.is_file())
                await runtime.write({f"/solution/{path.relative_to(solution)}": path.read_bytes() for path in files})
                ran = await runtime.run("bash /solution/solve.sh", _LONGEST_SECONDS)
                if ran.status or ran.stopped:
                    ended = f"was stopped ({ran.stopped})" if ran.stopped else f"ended with status {ran.status}"
                    raise EpisodeError(f"its solution {ended}: {ran.output[-_SHOWN:]}")
            rewards.append((await graded(runtime, task, short))[0])
        finally:
            runtime.stop()
    return rewards[0], rewards[1]
