"""Effects of the gates of a run: the candidates that they passed become those of their models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlhf_core.artifacts.aliases import Alias, read_alias
from rlhf_core.artifacts.gates import Gate, gate_of
from rlhf_core.artifacts.promotion import propose, waiting
from rlhf_core.artifacts.protection import CANDIDATE
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.config.stages.gate import ModelGateConfig
from rlhf_core.graph.graph import Node


@dataclass(frozen=True, slots=True)
class Judged:
    """A gate of a run that has a verdict."""

    node: str
    gate: Gate
    move: Alias | None  # of the model's candidate, by this gate; None: it moved none
    is_new: bool  # this run made the move
    waits: bool  # for a person
    next_step: str  # in Markdown: what a person does with the candidate; empty: nothing

    def lines(self) -> list[str]:
        """Return the verdict as paragraphs of Markdown."""
        verdict = "passed" if self.gate.passed else "refused"
        compared = f"`{self.gate.candidate}`, compared with `{self.gate.baseline}`"
        return [f"**{self.node}: {verdict}.** {compared}", self.gate.reason, *filter(None, [self.next_step])]


def settle_gates(nodes: Iterable[Node], repository: ArtifactRepository, run_id: str) -> Iterator[Judged]:
    """Move the alias `candidate` by each passed gate whose artifact is in the store, and yield all verdicts.

    A second call, as of a run that was killed and repeated, moves nothing again.
    """
    for node in nodes:
        config = node.config
        manifest = repository.manifest(node.ref) if isinstance(config, ModelGateConfig) else None
        if manifest is None or not isinstance(config, ModelGateConfig):
            continue
        gate, model, by = gate_of(manifest), config.model, f"run {run_id}"
        if not gate.passed or model is None:
            yield Judged(node.name, gate, move=None, is_new=False, waits=False, next_step="")
            continue
        move = propose(repository.store, model, node.ref, by=by)
        waits = waiting(repository.store, model) == move
        next_step = _next_step(repository.store, model, move, waits)
        yield Judged(node.name, gate, move, is_new=move.by == by, waits=waits, next_step=next_step)


def _next_step(store: Store, model: str, move: Alias, waits: bool) -> str:
    name, chosen = f"`{model}/{CANDIDATE}`", f"{model} --candidate {move.manifest}"
    if waits:
        commands = f"alignment approve {chosen}\nalignment reject {chosen} --reason WHY"
        return f"{name} waits for a person, here by the deployment `registry/decision`, or:\n\n```\n{commands}\n```"
    if read_alias(store, model, CANDIDATE) == move:
        return f"{name} is `{move.manifest}`:\n\n```\nalignment promote {chosen}\n```"
    return f"{name} was moved on since: `alignment log {model}`"
