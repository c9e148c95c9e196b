"""What follows from the gates of a run: the candidates that they passed become those of their models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlhf_core.artifacts.aliases import Alias
from rlhf_core.artifacts.gates import Gate, gate_of
from rlhf_core.artifacts.promotion import decision_on, propose
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.stages.gate import ModelGateConfig
from rlhf_core.graph.graph import Node


@dataclass(frozen=True, slots=True)
class Judged:
    """A gate of a run that has a verdict."""

    node: str
    model: str | None  # of the registry; None: the gate moves nothing
    gate: Gate
    move: Alias | None  # of the model's candidate, by this gate; None: it moved none
    waits: bool  # for a person

    def lines(self) -> list[str]:
        """Return the verdict as Markdown, with the command that comes next."""
        verdict = "passed" if self.gate.passed else "refused"
        lines = [
            f"**{self.node}: {verdict}.** `{self.gate.candidate}`, compared with `{self.gate.baseline}`",
            self.gate.reason,
        ]
        if self.waits:
            chosen = f"{self.model} --candidate {self.gate.candidate}"
            lines += [
                f"`{self.model}/candidate` waits for a person:",
                f"```\nalignment approve {chosen}\nalignment reject {chosen} --reason WHY\n```",
            ]
        elif self.move is not None:
            lines.append(f"`{self.model}/candidate` is `{self.gate.candidate}`: `alignment promote {self.model}`")
        return lines


def settle_gates(nodes: Iterable[Node], repository: ArtifactRepository, run_id: str) -> Iterator[Judged]:
    """Move the alias `candidate` by each passed gate whose artifact is in the store, and yield all verdicts.

    A second call, as of a run that was killed and repeated, moves nothing again.
    """
    for node in nodes:
        config = node.config
        manifest = repository.manifest(node.ref) if isinstance(config, ModelGateConfig) else None
        if manifest is None or not isinstance(config, ModelGateConfig):
            continue
        gate, move, waits = gate_of(manifest), None, False
        if gate.passed and config.model is not None:
            move = propose(repository.store, config.model, node.ref, by=f"run {run_id}")
            waits = gate.needs_approval and decision_on(repository.store, config.model, move) is None
        yield Judged(node.name, config.model, gate, move, waits)
