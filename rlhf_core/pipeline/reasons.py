"""The reasons that a node has no result: its fields that differ from the newest result of the same node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.base import result_settings
from rlhf_core.errors import shortened
from rlhf_core.graph.graph import Node


class Reasons:
    """The reasons of the nodes of `graph`, which are to be asked for in its order.

    results: all of the store; those of the recipe of this name are compared with.
    """

    def __init__(
        self, graph: Mapping[str, Node], repository: ArtifactRepository, results: Sequence[Manifest], recipe: str = ""
    ):
        self._graph = graph
        self._repository = repository
        self._newest = _newest_by_name(manifest for manifest in results if manifest.recipe == recipe)
        self._names = {manifest.ref: manifest.name for manifest in results}
        self._roots: dict[str, tuple[str, ...]] = {}  # node -> the nodes that it is computed because of

    def of(self, node: Node) -> str:
        """Return the reason in one line."""
        before = self._newest.get(node.name)
        if before is None or before.stage != node.stage.name:
            return "never computed"
        if before.ref == node.ref:
            return "its files are gone from the store"
        changed = self._changed_inputs(node, before)
        roots = [root for other in changed for root in self._roots.get(other, (other,))]
        own = [*_own_differences(node, before), *self._rewired(node, before)]
        shared = list(_shared_differences(node, before))
        if changed and not own and not shared:
            self._roots[node.name] = tuple(dict.fromkeys(roots))
        if changed:
            behind = dict.fromkeys(root for root in roots if root not in changed)
            own.append(f"after {', '.join(changed.values())}" + (f", because of {', '.join(behind)}" if behind else ""))
        return "; ".join([*own, *shared] or [self._version(node, before)])

    def _changed_inputs(self, node: Node, before: Manifest) -> dict[str, str]:
        """Return the nodes that had other results, described, without inputs that are read from another node now."""
        changed: dict[str, str] = {}
        for name, ref in node.input_refs.items():
            old, other = before.parents.get(name, ref), node.inputs[name]
            if old != ref and not self._is_rewired(node, name, before):
                # No job makes it: the recipe names an artifact, or an alias that was moved.
                changed[other] = other if self._graph[other].libraries else f"{other} ({old} → {ref})"
        return changed

    def _is_rewired(self, node: Node, name: str, before: Manifest) -> bool:
        """Return whether the input was the result of another node of the recipe."""
        other = self._graph[node.inputs[name]]
        old = self._names.get(before.parents[name])
        return old is not None and bool(other.libraries) and old != other.name

    def _rewired(self, node: Node, before: Manifest) -> Iterator[str]:
        for name, ref in node.input_refs.items():
            if name not in before.parents:
                yield f"{name}: none → {node.inputs[name]}"
            elif before.parents[name] != ref and self._is_rewired(node, name, before):
                yield f"{name}: {self._names[before.parents[name]]} → {node.inputs[name]}"
        for name, ref in before.parents.items():
            if name not in node.input_refs:
                yield f"{name}: {self._names.get(ref, ref)} → none"

    def _version(self, node: Node, before: Manifest) -> str:
        if not self._repository.has_spec(before.ref):
            return "the stage's code has a new version"
        version = self._repository.read_spec(before.ref).stage_version
        return f"the stage's code has a new version: {version} → {node.stage.version}"


def _own_differences(node: Node, before: Manifest) -> Iterator[str]:
    """Yield the changes since the manifest `before` of the same node that its own section or files made."""
    if node.rerun:
        yield f"computed again on purpose: {node.name}@{node.rerun}"
    elif before.rerun:
        yield f"the newest result is a repetition: {node.name}@{before.rerun}"
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


def _shared_differences(node: Node, before: Manifest) -> Iterator[str]:
    """Yield the changes of what the whole recipe shares."""
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
