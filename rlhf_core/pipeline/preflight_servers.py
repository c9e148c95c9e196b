"""Reward servers before anything runs: each is asked for the reward of one completion, as the job will ask it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.data import DatasetConfig
from rlhf_core.config.rewards import HTTPReward
from rlhf_core.data.formats import format_of
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.pipeline.graph import Node
from rlhf_core.pipeline.samples import Sample
from rlhf_core.rewards.http import RewardServer
from rlhf_core.rewards.servers import TransientError


@dataclass(frozen=True, slots=True)
class _Question:
    place: str  # of the reward in the recipe
    config: HTTPReward  # with one URL
    prompt: str
    row: Mapping[str, Any]


def ask_servers(
    graph: Mapping[str, Node],
    datasets: Mapping[str, DatasetConfig],
    samples: Mapping[str, Sample],
    repository: ArtifactRepository | None,
) -> list[str]:
    """A note for each server that cannot be reached: the cluster may, or it may start later.

    samples: rows of each dataset that could be read. repository: nodes of which it has the result ask no server.
    Raises RecipeError if a server gives another answer than a reward, or none in its `timeout_seconds`.
    """
    questions: list[_Question] = []
    for node in graph.values():
        asked = list(_questions(node, datasets, samples))
        if asked and (repository is None or repository.manifest(node.ref) is None):
            questions += asked
    if not questions:
        return []
    with ThreadPoolExecutor(len(questions)) as threads:
        answers = list(threads.map(_ask, questions))
    if problems := [problem for problem, _ in answers if problem]:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
    return list(dict.fromkeys(note for _, note in answers if note))


def _questions(node: Node, datasets: Mapping[str, DatasetConfig], samples: Mapping[str, Sample]) -> Iterator[_Question]:
    for judged in node.config.judges():
        server, dataset = judged.judge, node.inputs.get(judged.dataset, "").removeprefix("data.")
        rows = samples[dataset].rows if dataset in samples else []
        if not isinstance(server, HTTPReward) or not rows or rows[0][1].get("images"):
            continue  # what the job would send is not at hand
        _, row = rows[0]
        prompt = format_of(datasets[dataset].format).asked_text(row)
        for url in server.urls or (server.url,):
            one = server.model_copy(update={"url": url, "urls": (), "attempts": 1, "tolerated_failures": 0.0})
            yield _Question(f"{node.name}.{judged.setting}", one, prompt, row)


def _ask(question: _Question) -> tuple[str, str]:
    """The problem, and what to know."""
    try:
        server = RewardServer(question.config)
    except RewardError as error:  # a variable that only the job may have
        return "", f"{question.place} is not asked before the job: {error}"
    try:
        server(["yes"], [question.prompt], [question.row])
    except TransientError as error:
        return "", f"{question.place}: {error}; the job will ask it again"
    except RewardError as error:
        return f"{question.place}: {error} (it was asked for the reward of one completion)", ""
    finally:
        server.close()
    return "", ""
