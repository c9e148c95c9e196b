"""Preflight calls of the user's rewards and environments: one each, in its own process."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.image_messages import images_of_row
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.environments.environments import AnyEnvironment, FunctionEnvironment, ToleratesFailures
from rlhf_core.config.rewards.rewards import FunctionReward, RewardConfig
from rlhf_core.data.formats import Row, format_of
from rlhf_core.data.sources.base import Located
from rlhf_core.environments.base import Reply
from rlhf_core.environments.function import FunctionHost
from rlhf_core.errors import EpisodeError, RecipeError, StageError
from rlhf_core.graph.graph import Node
from rlhf_core.preflight.asking import REPLY, Answer, Question, ask, judged_rows
from rlhf_core.preflight.loading import missing_here, placed
from rlhf_core.preflight.samples import Sample
from rlhf_core.processes.user_code import last_place
from rlhf_core.rewards.function import RewardFunction
from rlhf_core.system.scratch import scratch_folder

_LONGEST_SECONDS = 60.0  # that a plan waits for an answer

Called = FunctionReward | FunctionEnvironment
Tolerating = FunctionReward | ToleratesFailures


def call_functions(
    graph: Mapping[str, Node],
    datasets: Mapping[str, DatasetConfig],
    samples: Mapping[str, Sample],
    root: Path,
    repository: ArtifactRepository | None,
) -> list[str]:
    """Return a note for each function that was skipped, or whose failures its job tolerates.

    samples: readable rows of each dataset. repository: functions of nodes whose result it has are skipped.
    Raises RecipeError if one fails for its row.
    """

    def questions(node: Node) -> Iterator[tuple[str, Question]]:
        for judged, name, located_rows in judged_rows(node, samples):
            rows = [each for each in located_rows if not images_of_row(each[1])]
            for below, config, (where, row) in _called(judged.judge, rows):
                place = ".".join(filter(None, (node.name, judged.setting, below)))
                prompt = format_of(datasets[name].format).asked_text(row)
                shares = [each.tolerated_failures for each in (judged.judge, config) if isinstance(each, Tolerating)]
                ask_it = partial(_answer, place, config, prompt, (where, row), root, tolerated=any(shares))
                yield f"{config.model_dump_json()} {where}", ask_it

    return ask(graph, repository, questions, os.cpu_count() or 1)


def _called(judge: RewardConfig | AnyEnvironment, rows: list[Located]) -> Iterator[tuple[str, Called, Located]]:
    """Yield each function of the judge to call, its setting below the judge's, and its first row."""
    if isinstance(judge, FunctionReward):
        parts: Mapping[str, Any] = {"": judge}
    elif isinstance(judge, AnyEnvironment):
        parts = judge.parts()
    else:
        return
    for below, part in parts.items():
        if isinstance(part, Called) and part.call_before_job:
            own_rows = (row for row in rows if isinstance(judge, FunctionReward) or judge.of_row(row[1]) is part)
            if (first := next(own_rows, None)) is not None:
                yield below, part, first


def _answer(place: str, config: Called, prompt: str, located: Located, root: Path, *, tolerated: bool) -> Answer:
    if unset := [name for name in config.variables if name not in os.environ]:
        return Answer(note=f"{place} is not called before its job: the variable {unset[0]} is not set here")
    try:
        _call(config, prompt, located[1], root)
    except (RecipeError, StageError) as error:
        text = str(error)
    else:
        return Answer()
    if missing := missing_here(text):
        return Answer(note=f"{place} is not called before its job: {missing} is not installed here")
    first, _, traceback = text.partition("\n")
    if "did not return within" in first and _seconds(config) < config.timeout_seconds:
        return Answer(note=f"{place}: {first}; its job waits {config.timeout_seconds:g} s")
    at = last_place(traceback, config.path, (root / config.path).parent)
    message = f"{place}: {first}{f' ({at})' if at else ''}; it was called with the completion {REPLY!r} of {located[0]}"
    if tolerated:
        return Answer(note=message)
    return Answer(f"{message} (`call_before_job: false` if it needs what only its job has)")


def _seconds(config: Called) -> float:
    return min(config.timeout_seconds, _LONGEST_SECONDS)


def _call(config: Called, prompt: str, row: Row, root: Path) -> None:
    """Call the function as its job will. Raises RecipeError or StageError if it fails to load, or returns no reward."""
    one = config.model_copy(update={"timeout_seconds": _seconds(config), "tolerated_failures": 0.0})
    # Its output is not part of the plan; and a job works in another folder than the user's.
    with placed(root, config) as file, tempfile.TemporaryFile() as log, scratch_folder("job") as folder:
        if isinstance(one, FunctionReward):
            with closing(RewardFunction(one, file, log=log, folder=folder)) as function:
                function([REPLY], [prompt], [row])
        else:
            with closing(FunctionHost(one, file, log=log, folder=folder)) as environments:
                asyncio.run(_episode(environments, row))


async def _episode(environments: FunctionHost, row: Row) -> None:
    try:
        with closing(environments.new()) as episode:
            await episode.reset(row, 0)
            await episode.step(Reply(REPLY, REPLY))
    except EpisodeError as error:
        raise EpisodeError(f"{environments.name}: {error}") from error
