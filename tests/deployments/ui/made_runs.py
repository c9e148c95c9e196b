"""Runs that a test puts into a store, of artifacts whose files it writes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.pipeline.record import NodeRecord, RunRecord, write_record

AT = datetime(2026, 11, 1, 9, tzinfo=UTC)


def ref_of(name: str, stage: str = "dataset") -> ArtifactRef:
    return ArtifactRef(stage=stage, key=hashlib.sha256(f"{stage} {name}".encode()).hexdigest())


def publish(
    store: Store, ref: ArtifactRef, folder: Path, *, kind: Kind = Kind.DATASET, name: str = "",
    metrics: Mapping[str, Any] | None = None, parents: Mapping[str, ArtifactRef] | None = None,
) -> Manifest:  # fmt: skip
    manifest = Manifest(
        kind=kind, name=name or ref.stage, stage=ref.stage, key=ref.key, files=(), parents=dict(parents or {}),
        user_files={}, pins={}, config={}, seed=None, metrics=dict(metrics or {}), code_revision="test", libraries={},
        device_seconds=60.0, device="cpu", started_at=AT, finished_at=AT + timedelta(minutes=1),
    )  # fmt: skip
    return ArtifactRepository(store).publish(manifest, folder)


def record(
    store: Store, nodes: list[NodeRecord], run_id: str = "made", seconds: float = 600.0, started_at: datetime = AT
) -> None:
    write_record(
        store,
        RunRecord(
            run_id=run_id, recipe={"name": "made"}, overrides=(), started_at=started_at,
            finished_at=started_at + timedelta(seconds=seconds), nodes=tuple(nodes),
        ),
    )  # fmt: skip
