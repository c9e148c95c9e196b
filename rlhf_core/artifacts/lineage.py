"""Lineage of an artifact: the manifests of all its ancestors, back to the first datasets and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import StoreError


@dataclass(frozen=True, slots=True)
class Edge:
    parent: ArtifactRef
    child: ArtifactRef
    role: str  # the child's name for this input


@dataclass(frozen=True, slots=True)
class Lineage:
    nodes: Mapping[ArtifactRef, Manifest]  # parents before children, the artifact itself last
    edges: tuple[Edge, ...]


def lineage(repository: ArtifactRepository, ref: ArtifactRef) -> Lineage:
    """Return the ancestors of `ref`, each once. Raises StoreError if a manifest or blob of one is missing."""
    nodes: dict[ArtifactRef, Manifest] = {}
    edges: list[Edge] = []
    visited = {ref}

    def visit(current: ArtifactRef, needed_for: str) -> None:
        manifest = repository.manifest(current)
        if manifest is None:
            raise StoreError(f"{repository.store.url} has no artifact {current}{needed_for}")
        for role, parent in sorted(manifest.parents.items()):
            edges.append(Edge(parent, current, role))
            if parent not in visited:
                visited.add(parent)
                visit(parent, f", which {manifest.name} ({current}) was made from")
        nodes[current] = manifest

    visit(ref, "")
    return Lineage(nodes, tuple(edges))
