"""The plan of a run: the nodes it would compute, and why, without side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.reasons import Reasons


@dataclass(frozen=True, slots=True)
class PlannedNode:
    name: str
    ref: ArtifactRef
    action: Literal["reuse", "compute"]
    why: str  # for compute: what differs from the newest artifact of the same node, and from where a killed job resumes
    reads: tuple[str, ...]  # the nodes whose results it reads
    manifest: Manifest | None  # of the reused result
    resumes_after: int | None = None  # the step of the checkpoint that a job would resume from


def plan(
    graph: Mapping[str, Node],
    repository: ArtifactRepository | None,
    *,
    recipe: str = "",
    results: list[Manifest] | None = None,
) -> list[PlannedNode]:
    """Return every node of `graph` in an order in which they can run. Only reads the store; None: no store.

    recipe: its name; results are compared only with those of its earlier runs.
    results: receives all results of the store, if it was searched because something is to be computed.

    Raises StoreError if the store cannot be read.
    """
    if repository is None:
        return [_entry(node, "compute", "no store is set", None) for node in graph.values()]
    manifests = {name: repository.manifest(node.ref) for name, node in graph.items()}
    reasons = Reasons(graph, repository, [])
    if None in manifests.values():
        listed = list(repository.list_artifacts())
        reasons = Reasons(graph, repository, listed, recipe)
        if results is not None:
            results += listed
    planned = [_planned(node, manifests[node.name], reasons) for node in graph.values()]
    return [
        _resuming(planned_node, node, repository.store) if planned_node.action == "compute" else planned_node
        for node, planned_node in zip(graph.values(), planned, strict=True)
    ]


def _resuming(planned: PlannedNode, node: Node, store: Store) -> PlannedNode:
    """Return `planned` with the checkpoint that a killed job would resume from."""
    settings = node.config.checkpoints
    step = Checkpoints(store, node.ref).newest_step() if settings is not None and settings.resume else None
    if settings is None or step is None:
        return planned
    return replace(planned, why=f"{planned.why}; resumes {settings.position(step)}", resumes_after=step)


def _planned(node: Node, manifest: Manifest | None, reasons: Reasons) -> PlannedNode:
    if manifest is not None:
        return _entry(node, "reuse", f"made {manifest.finished_at:%Y-%m-%d %H:%M}", manifest)
    return _entry(node, "compute", reasons.of(node), None)


def _entry(node: Node, action: Literal["reuse", "compute"], why: str, manifest: Manifest | None) -> PlannedNode:
    reads = ("all above",) if node.stage.reads_all else tuple(dict.fromkeys(node.inputs.values()))
    return PlannedNode(node.name, node.ref, action, why, reads, manifest)
