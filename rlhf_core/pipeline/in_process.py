"""Runs one node of a recipe in this process, where a debugger reaches it: without Ray, Prefect or a server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.prepare import Prepared
from rlhf_core.pipeline.record import needs_path, write_needs
from rlhf_core.pipeline.specs import run_settings, store_spec
from rlhf_core.stages.job_context import node_cache
from rlhf_core.stages.runner import run_job
from rlhf_core.tracking.progress import ProgressReporter
from rlhf_core.tracking.protocol import parse

if TYPE_CHECKING:
    from rlhf_core.stages.cluster import Cluster

Say = Callable[[str], None]
OpenCluster = Callable[[], "Cluster"]


@dataclass(frozen=True, slots=True)
class Tried:
    manifest: Manifest  # of the node computed now
    folder: Path  # its files, read-only
    kept: Manifest | None  # the earlier result that the store keeps


def in_process_cluster() -> Cluster:
    from rlhf_core.stages.in_process import InProcessCluster

    return InProcessCluster()


def try_node(
    prepared: Prepared, node: Node, say: Say, *, again: bool = False, cluster: OpenCluster = in_process_cluster
) -> Tried:
    """Compute `node`, even if the store has its result, and before it the inputs that the store lacks.

    say: is called with lines for the user, among them one for each node. again: also recompute all inputs. cluster: of
    the stages that compute in actors.
    Exceptions of a stage pass through.
    """
    run_id = f"try-{uuid.uuid4().hex}"
    write_needs(prepared.store, run_id, [each.ref for each in prepared.graph.values()])
    try:
        return _try_node(prepared, node, say, again, cluster)
    finally:
        prepared.store.delete(needs_path(run_id))


def _try_node(prepared: Prepared, node: Node, say: Say, again: bool, cluster: OpenCluster) -> Tried:
    repository = prepared.repository
    for other in _before(prepared, node, again):
        manifest = repository.manifest(other.ref)
        if manifest is not None and not (again and other.stage.entry):
            say(f"{other.name}: reused, made {manifest.finished_at:%Y-%m-%d %H:%M}")
        else:
            _compute(prepared, other, say, again, cluster)
    kept = repository.manifest(node.ref)
    manifest = _compute(prepared, node, say, True, cluster) if node.stage.entry or kept is None else kept
    files = {file.path: file.sha256 for file in manifest.files}
    return Tried(manifest, repository.materialise(files, node_cache()), kept)


def _before(prepared: Prepared, node: Node, again: bool) -> list[Node]:
    """Return the nodes that `node` depends on, in the order of the graph; without those of finished results, unless
    `again`.
    """
    needed: set[str] = set()

    def need(names: Iterator[str]) -> None:
        for name in names:
            if name not in needed:
                needed.add(name)
                if again or prepared.repository.manifest(prepared.graph[name].ref) is None:
                    need(_needs(prepared.graph[name]))

    need(_needs(node))
    return [other for name, other in prepared.graph.items() if name in needed]


def _needs(node: Node) -> Iterator[str]:
    yield from node.inputs.values()
    yield from node.after


def _compute(prepared: Prepared, node: Node, say: Say, again: bool, cluster: OpenCluster) -> Manifest:
    say(f"{node.name}: starts")
    began = time.monotonic()
    store_spec(node, run_settings(prepared), prepared.repository)
    progress = ProgressReporter(lambda line: say(f"{node.name}: {parse(line)}"))
    manifest = run_job(prepared.store.url, node.ref, cluster=cluster, progress=progress, again=again)
    say(f"{node.name}: computed in {time.monotonic() - began:.1f} s")
    return manifest
