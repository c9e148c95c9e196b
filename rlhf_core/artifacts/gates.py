"""Verdicts of gates, read from the manifests of their artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError

# The inputs of each kind of gate: the candidate, and the model that it is compared with.
GATES: Mapping[Kind, tuple[str, str]] = {
    Kind.GATE: ("candidate", "baseline"),
    Kind.ROUND: ("candidate", "accepted"),
}


@dataclass(frozen=True, slots=True)
class Gate:
    ref: ArtifactRef
    candidate: ArtifactRef
    baseline: ArtifactRef
    passed: bool
    reason: str
    needs_approval: bool


def read_gate(store: Store, ref: ArtifactRef) -> Gate:
    """Return the verdict of a gate. Raises StoreError if there is no such artifact, or it is no gate."""
    manifest = ArtifactRepository(store).stored_manifest(ref)
    if manifest is None:
        raise StoreError(f"the gate {ref} is gone from the store: run its recipe again")
    return gate_of(manifest)


def gate_of(manifest: Manifest) -> Gate:
    """Return the verdict in a manifest. Raises StoreError if the artifact is no gate."""
    names = GATES.get(manifest.kind)
    if names is None or not manifest.parents.keys() >= set(names):
        raise StoreError(f"{manifest.ref} is a {manifest.kind}, not a gate's verdict")
    candidate, baseline = (manifest.parents[name] for name in names)
    return Gate(
        manifest.ref, candidate, baseline,
        passed=manifest.metrics.get("accepted") == 1,
        reason=str(manifest.metrics.get("reason", "")),
        needs_approval=manifest.config.get("approval") == "required",
    )  # fmt: skip
