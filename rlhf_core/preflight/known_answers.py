"""Preflight comparison of rewards on known answers, where these can be called without a job."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.image_messages import images_of_row
from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.rewards.rewards import FunctionReward, RewardConfig, TextReward, VerifierReward
from rlhf_core.data.formats import format_of
from rlhf_core.errors import RecipeError, StageError
from rlhf_core.graph.graph import Node
from rlhf_core.preflight.asking import Answer, Question, ask, judged_rows
from rlhf_core.preflight.loading import placed
from rlhf_core.preflight.samples import Sample
from rlhf_core.rewards.base import Reward
from rlhf_core.rewards.function import RewardFunction
from rlhf_core.rewards.known_answers import Asked, compared
from rlhf_core.rewards.verifier import Verifier
from rlhf_core.system.scratch import scratch_folder

_LONGEST_SECONDS = 60.0  # that a plan waits for an answer


def check_answers(
    graph: Mapping[str, Node],
    datasets: Mapping[str, DatasetConfig],
    samples: Mapping[str, Sample],
    root: Path,
    repository: ArtifactRepository | None,
) -> list[str]:
    """Return a note for each node whose rows have answers and none of whose rewards could be compared on them.

    samples: readable rows of each dataset. repository: nodes whose result it has are skipped.
    Raises RecipeError for a reward that takes a wrong answer for right.
    """

    def questions(node: Node) -> Iterator[tuple[str, Question]]:
        by_dataset: dict[str, dict[str, RewardConfig]] = {}
        for judged, name, located_rows in judged_rows(node, samples):
            if located_rows and isinstance(judged.judge, RewardConfig):
                by_dataset.setdefault(name, {})[f"{node.name}.{judged.setting}"] = judged.judge
        for name, rewards in by_dataset.items():
            text_of = format_of(datasets[name].format).asked_text
            # Images are read in jobs alone: such rows are compared there.
            rows = [Asked(place, text_of(row), row) for place, row in samples[name].rows if not images_of_row(row)]
            if any(row.row.get("answer") for row in rows):
                yield f"{node.name} {name}", partial(_compared, rewards, rows, root)

    return ask(graph, repository, questions, os.cpu_count() or 1)


def _compared(rewards: Mapping[str, RewardConfig], rows: Sequence[Asked], root: Path) -> Answer:
    """Compare the rewards of one dataset's rows, by setting."""
    unknown = []
    told_apart = False
    for place, config in rewards.items():
        if (why := _why_not_called(config)) is not None:
            unknown.append(f"{place} ({why})")
            continue
        assert isinstance(config, TextReward)
        try:
            with _opened(config, root) as reward:
                comparison = compared(config, reward, rows)
        except (RecipeError, StageError) as error:  # of a file that is not loaded here
            unknown.append(f"{place} ({str(error).partition(chr(10))[0]})")
            continue
        if comparison.problem:
            return Answer(f"{place} {comparison.problem}")
        if comparison.unknown:
            unknown.append(f"{place} ({comparison.unknown})")
        told_apart |= not comparison.unknown
    if told_apart or not unknown:
        return Answer()
    return Answer(note=f"no reward was checked with known answers: {'; '.join(unknown)}")


def _why_not_called(config: RewardConfig) -> str | None:
    """Return why a reward cannot be called before its job; None if it can."""
    if not isinstance(config, TextReward):
        return "it is not of text alone"
    if config.check is False:
        return "`check` is false"
    if isinstance(config, VerifierReward):
        return None
    if not isinstance(config, FunctionReward):
        return "its job calls it" if config.check else "set `check`, and its job calls it"
    if not config.call_before_job:
        return "`call_before_job` is false"
    unset = next((name for name in config.variables if name not in os.environ), None)
    return None if unset is None else f"the variable {unset} is not set here"


@contextmanager
def _opened(config: TextReward, root: Path) -> Iterator[Reward]:
    if isinstance(config, VerifierReward):
        with closing(Verifier(config)) as verifier:
            yield verifier
        return
    assert isinstance(config, FunctionReward)
    seconds = min(config.timeout_seconds, _LONGEST_SECONDS)
    one = config.model_copy(update={"timeout_seconds": seconds, "tolerated_failures": 0.0})
    # Its output is not part of the plan; and a job works in another folder than the user's.
    with (
        placed(root, config) as file,
        tempfile.TemporaryFile() as log,
        scratch_folder("job") as folder,
        closing(RewardFunction(one, file, log=log, folder=folder)) as function,
    ):
        yield function
