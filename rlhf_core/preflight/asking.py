"""Preflight queries of reward servers and functions, with the first row of their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.stages.base import JudgedBy
from rlhf_core.data.sources.base import Located
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import Node
from rlhf_core.preflight.samples import Sample


@dataclass(frozen=True, slots=True)
class Answer:
    problem: str = ""  # for which nothing is started
    note: str = ""  # a note, no mistake of the recipe


REPLY = "yes"  # of the policy, which is judged


def judged_rows(node: Node, samples: Mapping[str, Sample]) -> Iterator[tuple[JudgedBy, str, list[Located]]]:
    """Yield each judge of a node, the name of its dataset, and the readable rows of that; none without a sample."""
    for judged in node.config.judges():
        name = node.inputs.get(judged.dataset, "").removeprefix("data.")
        yield judged, name, samples[name].rows if name in samples else []


Question = Callable[[], Answer]


def ask(
    graph: Mapping[str, Node],
    repository: ArtifactRepository | None,
    questions: Callable[[Node], Iterator[tuple[str, Question]]],
    at_once: int,
) -> list[str]:
    """Run the questions of all nodes and return notes.

    questions: yields a node's questions with their content; equal content is queried once. at_once: concurrent
    questions.
    repository: nodes whose result it has are skipped. Raises RecipeError with all problems.
    """
    questions_by_content: dict[str, Question] = {}
    for node in graph.values():
        node_questions = dict(questions(node))
        if node_questions and (repository is None or repository.manifest(node.ref) is None):
            questions_by_content = node_questions | questions_by_content
    if not questions_by_content:
        return []
    with ThreadPoolExecutor(at_once) as threads:
        answers = list(threads.map(lambda question: question(), questions_by_content.values()))
    if problems := [answer.problem for answer in answers if answer.problem]:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
    return list(dict.fromkeys(answer.note for answer in answers if answer.note))
