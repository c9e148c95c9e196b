"""The plan of a run: the nodes it would compute, and why, without side effects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import result_settings
from rlhf_core.errors import shortened
from rlhf_core.graph.graph import Node


@dataclass(frozen=True, slots=True)
class PlannedNode:
    name: str
    ref: ArtifactRef
    action: Literal["reuse", "compute"]
    why: str  # for compute: what differs from the newest artifact of the same node, and from where a killed job resumes
    reads: tuple[str, ...]  # the nodes whose results it reads
    manifest: Manifest | None  # of the reused result


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
    newest: dict[str, Manifest] = {}
    if None in manifests.values():
        listed = list(repository.list_artifacts())
        newest = _newest_by_name(manifest for manifest in listed if manifest.recipe == recipe)
        if results is not None:
            results += listed
    planned = [_planned(node, manifests[node.name], newest.get(node.name)) for node in graph.values()]
    return [
        replace(planned_node, why=planned_node.why + _resumes(node, repository.store))
        if planned_node.action == "compute"
        else planned_node
        for node, planned_node in zip(graph.values(), planned, strict=True)
    ]


def _resumes(node: Node, store: Store) -> str:
    """Return the checkpoint that a killed job would resume from; empty if there is none."""
    settings = node.config.checkpoints
    step = Checkpoints(store, node.ref).newest_step() if settings is not None and settings.resume else None
    return "" if step is None else f"; resumes from step {step}"


def _planned(node: Node, manifest: Manifest | None, before: Manifest | None) -> PlannedNode:
    if manifest is not None:
        return _entry(node, "reuse", f"made {manifest.finished_at:%Y-%m-%d %H:%M}", manifest)
    if before is None or before.stage != node.stage.name:
        return _entry(node, "compute", "never computed", None)
    differences = list(_differences(node, before))
    if not differences:
        gone = before.ref == node.ref
        differences = ["its files are gone from the store" if gone else "the stage's code has a new version"]
    return _entry(node, "compute", "; ".join(differences), None)


def _entry(node: Node, action: Literal["reuse", "compute"], why: str, manifest: Manifest | None) -> PlannedNode:
    reads = ("all above",) if node.stage.reads_all else tuple(dict.fromkeys(node.inputs.values()))
    return PlannedNode(node.name, node.ref, action, why, reads, manifest)


def _differences(node: Node, before: Manifest) -> Iterator[str]:
    """Yield the changes since the manifest `before` of the same node, the nearest causes first."""
    try:
        old = result_settings(node.stage.config.model_validate_json(json.dumps(before.config)))
    except ValidationError:
        yield "its settings have a new form"
    else:
        yield from _changed_settings(old, result_settings(node.config))
    for path in sorted(node.user_files.keys() | before.user_files.keys()):
        if node.user_files.get(path) != before.user_files.get(path):
            yield f"the file {path} changed"
    for url, identity in sorted(node.pins.items()):
        if url not in before.pins:
            yield f"the source {url} was not pinned before"
        elif before.pins[url] != identity:
            yield f"the source {url} changed"
    changed = [node.inputs[name] for name, ref in node.input_refs.items() if before.parents.get(name) != ref]
    if changed:
        yield f"after {', '.join(changed)}"
    if node.seed != before.seed:
        yield f"seed: {_short(before.seed)} → {_short(node.seed)}"
    for name in sorted(node.libraries.keys() | before.libraries.keys()):
        if node.libraries.get(name) != before.libraries.get(name):
            yield f"{name}: {before.libraries.get(name, 'none')} → {node.libraries.get(name, 'none')}"


def _changed_settings(old: Any, new: Any, at: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            yield from _changed_settings(old.get(key), new.get(key), f"{at}.{key}" if at else str(key))
    elif old != new:
        yield f"{at}: {_short(old)} → {_short(new)}"


def _short(value: Any) -> str:
    return shortened("none" if value is None else str(value), 40)


def _newest_by_name(manifests: Iterable[Manifest]) -> dict[str, Manifest]:
    newest: dict[str, Manifest] = {}
    for manifest in manifests:
        current = newest.get(manifest.name)
        if current is None or manifest.finished_at > current.finished_at:
            newest[manifest.name] = manifest
    return newest
