"""The record of what a job's processes use: how large it becomes, where it is, and that nothing depends on it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.resources import AttemptUses, ProcessUses, read_uses, uses_path
from rlhf_core.errors import IntegrityError, StoreError
from rlhf_core.stages import resources
from rlhf_core.stages.resources import ResourceRecord, recorded
from rlhf_core.system.resources import Sample

REF = ArtifactRef(stage="rl", key="0" * 64)
AT = datetime(2026, 11, 1, tzinfo=UTC)
SAMPLE = Sample(cores=1.5, host_bytes=2**30, gpu_share=0.5, gpu_bytes=2**20)


class Cluster:
    def resources(self) -> Mapping[str, Sample]:
        return {"rank 0": SAMPLE}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_SECONDS", 0.01)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(store: LocalStore, seen: Any) -> None:
    clusters: Any = (Cluster(),)
    with recorded(store, REF, AT, "an-id", clusters):
        wait_for(seen)


@pytest.mark.usefixtures("often")
def test_a_job_and_its_ranks_are_in_one_document_beside_the_attempt(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    run(store, lambda: read_uses(store, REF) and len(read_uses(store, REF)[0].processes["rank 0"].seconds) >= 2)
    (uses,) = read_uses(store, REF)
    assert (uses.started_at, set(uses.processes)) == (AT, {"job", "rank 0"})
    rank, job = uses.processes["rank 0"], uses.processes["job"]
    assert (rank.cores[0], rank.host_bytes[0], rank.gpu_share[0], rank.gpu_bytes[0]) == (1.5, 2**30, 0.5, 2**20)
    assert (job.host_bytes[0] > 2**20, job.gpu_share[0]) == (True, None)
    assert Attempts(store, REF).all() == []  # it is none of them
    count = len(rank.seconds)
    time.sleep(0.1)
    assert len(read_uses(store, REF)[0].processes["rank 0"].seconds) == count  # the thread has ended


class BrokenStore(LocalStore):
    asked = 0

    def put(self, path: str, data: bytes) -> None:
        self.asked += 1
        raise StoreError("the disk is full")


@pytest.mark.usefixtures("often")
def test_a_store_that_fails_costs_the_record_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = BrokenStore(tmp_path)
    run(store, lambda: store.asked >= 2)
    assert "what this job uses cannot be stored for now: the disk is full" in capsys.readouterr().out


def test_a_long_job_has_fewer_samples_a_minute_and_no_larger_document() -> None:
    record = ResourceRecord(AT)
    seconds, taken = 0.0, 0
    while seconds < 24 * 3600:
        seconds += record.interval
        record.add(seconds, {"job": SAMPLE})
        taken += 1
    uses = record.document().processes["job"]
    assert 250 <= len(uses.seconds) <= 500
    assert (record.interval, taken < 2000) == (320.0, True)
    assert uses.seconds[-1] > 23.5 * 3600
    assert len(record.document().model_dump_json()) < 500 * 60


def test_a_document_whose_columns_differ_is_damaged(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    damaged = ProcessUses(seconds=(1.0, 2.0), cores=(1.0,), host_bytes=(1,), gpu_share=(None,), gpu_bytes=(None,))
    document = AttemptUses(started_at=AT + timedelta(hours=1), processes={"job": damaged})
    store.put(uses_path(REF, AT, "a"), document.model_dump_json().encode())
    with pytest.raises(IntegrityError, match="its columns differ in length"):
        read_uses(store, REF)
