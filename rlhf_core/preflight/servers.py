"""Preflight queries of reward servers: each is sent one completion, in the job's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.image_messages import images_of_row
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.rewards.rewards import HTTPReward
from rlhf_core.data.formats import format_of
from rlhf_core.errors import RewardError
from rlhf_core.graph.graph import Node
from rlhf_core.preflight.asking import REPLY, Answer, Question, ask, judged_rows
from rlhf_core.preflight.samples import Sample
from rlhf_core.rewards.http import RewardServer
from rlhf_core.rewards.servers import TransientError

_AT_ONCE = 32


def ask_servers(
    graph: Mapping[str, Node],
    datasets: Mapping[str, DatasetConfig],
    samples: Mapping[str, Sample],
    repository: ArtifactRepository | None,
) -> list[str]:
    """Return a note for each unreachable server: the cluster may reach it, or it may start later.

    samples: readable rows of each dataset. repository: nodes whose result it has query no server.
    Raises RecipeError if a server returns anything but a reward, or nothing within its `timeout_seconds`.
    """
    return ask(graph, repository, lambda node: _questions(node, datasets, samples), _AT_ONCE)


def _questions(
    node: Node, datasets: Mapping[str, DatasetConfig], samples: Mapping[str, Sample]
) -> Iterator[tuple[str, Question]]:
    for judged, dataset, rows in judged_rows(node, samples):
        server = judged.judge
        if not isinstance(server, HTTPReward) or not rows or images_of_row(rows[0][1]):
            continue  # the job's request cannot be built here
        _, row = rows[0]
        prompt = format_of(datasets[dataset].format).asked_text(row)
        for url in server.urls or (server.url,):
            one = server.model_copy(update={"url": url, "urls": (), "attempts": 1, "tolerated_failures": 0.0})
            place = f"{node.name}.{judged.setting}"
            yield f"{place} {url}", partial(_answer, place, one, prompt, row)


def _answer(place: str, config: HTTPReward, prompt: str, row: Mapping[str, Any]) -> Answer:
    """Query the server with the job's request. config: with one URL."""
    try:
        server = RewardServer(config)
    except RewardError as error:  # a variable that only the job may have
        return Answer(note=f"{place} is not asked before the job: {error}")
    try:
        server([REPLY], [prompt], [row])
    except TransientError as error:
        return Answer(note=f"{place}: {error}; the job will ask it again")
    except RewardError as error:
        return Answer(f"{place}: {error} (it was asked for the reward of one completion)")
    finally:
        server.close()
    return Answer()
