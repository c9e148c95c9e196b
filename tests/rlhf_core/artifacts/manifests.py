"""Manifests for tests of what handles them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository


def manifest(name: str, stage: str = "sft", **changes: object) -> Manifest:
    """A manifest without files, whose key comes from its name."""
    now = datetime(2026, 1, 2, tzinfo=UTC)
    plain = Manifest(
        kind=Kind.POLICY, name=name, stage=stage, key=hashlib.sha256(name.encode()).hexdigest(), files=(), parents={},
        config={"epochs": 1}, seed=3, metrics={"loss": 0.5, "steps": 7, "note": "x", "gap": None}, code_revision="abc",
        libraries={"torch": "2"}, device_seconds=1.5, device="cpu", started_at=now, finished_at=now,
    )  # fmt: skip
    return plain.model_copy(update=changes)


def published(
    repository: ArtifactRepository,
    folder: Path,
    name: str,
    stage: str = "sft",
    parents: dict[str, ArtifactRef] | None = None,
) -> Manifest:
    """An artifact with one file, which holds its name."""
    folder.mkdir(parents=True)
    (folder / "name.txt").write_text(name)
    return repository.publish(manifest(name, stage, parents=parents or {}), folder)


def gate(
    repository: ArtifactRepository,
    folder: Path,
    candidate: ArtifactRef,
    baseline: ArtifactRef,
    *,
    passed: bool = True,
    approval: str | None = None,
    ref: ArtifactRef | None = None,
) -> ArtifactRef:
    """The verdict of a gate. ref: the artifact; None: its key comes from the folder's name."""
    folder.mkdir(parents=True)
    (folder / "verdict.json").write_text("{}")
    verdict = manifest(
        folder.name, "gate", kind=Kind.GATE, parents={"candidate": candidate, "baseline": baseline},
        metrics={"accepted": int(passed), "reason": "exact: +0.1"}, config={"approval": approval},
    )  # fmt: skip
    named = verdict if ref is None else verdict.model_copy(update={"key": ref.key})
    return repository.publish(named, folder).ref
