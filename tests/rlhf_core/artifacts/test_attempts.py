"""Attempts in a store: one that died is known, and its time counts until its last heartbeat."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts.attempt import Attempt, Peak
from rlhf_core.artifacts.attempts import Attempts, attempts_at
from rlhf_core.artifacts.leases import Lease, lease_path, take_lease
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import IntegrityError
from tests.rlhf_core.artifacts.manifests import manifest

REF = ArtifactRef(stage="sft", key="a" * 64)
START = datetime(2026, 1, 2, 3, tzinfo=UTC)


def _attempt(name: str, hour: int = 0, **changes: object) -> Attempt:
    started = START + timedelta(hours=hour)
    plain = Attempt(
        id=name, host="node", device="H200", gpus=2.0, cores=4.0,
        started_at=started, seen_at=started + timedelta(seconds=100),
    )  # fmt: skip
    return plain.model_copy(update=changes)


def test_one_that_runs_is_running_and_one_without_its_lease_was_killed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    attempts = Attempts(store, REF)
    lease = take_lease(store, lease_path(REF))
    assert isinstance(lease, Lease)
    attempts.write(_attempt("dead"))
    attempts.write(_attempt(lease.holder.id, hour=1))
    assert [each.outcome for each in attempts.all()] == ["killed", "running"]
    lease.release()
    assert [each.outcome for each in attempts.all()] == ["killed", "killed"]
    assert [each.device_seconds for each in attempts.all()] == [200.0, 200.0]


def test_the_next_job_stores_the_ends_of_the_dead(tmp_path: Path) -> None:
    attempts = Attempts(LocalStore(tmp_path), REF)
    attempts.write(_attempt("dead"))
    attempts.write(_attempt("failed", hour=1, outcome="failed", reason="no memory"))
    attempts.write(_attempt("ours", hour=2))
    assert [each.outcome for each in attempts.close_dead("ours")] == ["killed", "failed", "running"]
    assert [each.outcome for each in attempts._stored()] == ["killed", "failed", "running"]


def test_one_that_was_killed_after_it_had_published_is_published(tmp_path: Path) -> None:
    """Its document is of its last heartbeat, and the manifest has its end."""
    store = LocalStore(tmp_path / "store")
    stored = manifest("model", attempts=(_attempt("dead", outcome="killed"), _attempt("last", 1, outcome="published")))
    ArtifactRepository(store).commit(stored)
    attempts = Attempts(store, stored.ref)
    attempts.write(_attempt("dead", outcome="killed"))
    attempts.write(_attempt("last", 1, seen_at=START + timedelta(hours=1)))
    attempts.write(_attempt("second", 2))
    ends = ["killed", "published", "killed"]
    assert [each.outcome for each in attempts.all()] == ends
    assert attempts.all()[1].seconds == 100
    assert [each.outcome for each in attempts.close_dead("ours")] == ends


def test_what_an_attempt_took(tmp_path: Path) -> None:
    waited = _attempt("a", waited=40.0, memory=2 << 30)
    assert (waited.seconds, waited.device_seconds, waited.core_seconds, waited.gib_seconds) == (60, 120, 240, 120)
    measured = waited.model_copy(
        update={"peaks": (Peak(process="job", host=3 << 30), Peak(process="rank 0", host=1 << 30))}
    )
    assert measured.gib_seconds == 240
    assert _attempt("a", gpus=0.0).device_seconds == 400


def test_a_manifest_of_an_earlier_release_is_one_attempt(tmp_path: Path) -> None:
    now = START + timedelta(seconds=10)
    old = manifest("old", started_at=START, finished_at=now, device="H200", device_seconds=80.0)
    (one,) = attempts_at(LocalStore(tmp_path), REF, old)
    assert (one.gpus, one.cores, one.device_seconds, one.outcome) == (8.0, 0.0, 80.0, "published")
    assert attempts_at(LocalStore(tmp_path), REF, None) == []


def test_a_damaged_document_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put(f"{REF.path}/attempts/x.json", b"{")
    with pytest.raises(IntegrityError, match=r"attempts/x\.json is not an attempt"):
        Attempts(store, REF).all()
