"""Leases: one holder at a time, renewed while it works, taken over when it is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from rlhf_core.artifacts import leases
from rlhf_core.artifacts.leases import Holder, Lease, LeaseRecord, lease_path, take_lease, wait_for_lease
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StageError

pytestmark = pytest.mark.parts

REF = ArtifactRef(stage="sft", key="a" * 64)
ELSEWHERE = Holder(id="x", host="far", machine="another", pid=7, process_started=0.0)


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def _held(store: Store, lifetime: float = 40.0) -> Lease:
    taken = take_lease(store, lease_path(REF), lifetime=timedelta(seconds=lifetime))
    assert isinstance(taken, Lease)
    return taken


def _record(store: Store) -> LeaseRecord:
    data = store.get(lease_path(REF))
    assert data is not None
    return LeaseRecord.model_validate_json(data)


def _write(store: Store, holder: Holder, expires_in: float) -> None:
    expires = datetime.now(UTC) + timedelta(seconds=expires_in)
    store.put(lease_path(REF), LeaseRecord(holder=holder, expires_at=expires, renewals=0).model_dump_json().encode())


def test_a_held_lease_is_not_given_again_until_it_is_released(store: Store) -> None:
    first = _held(store)
    second = take_lease(store, lease_path(REF))
    assert isinstance(second, Holder)
    assert second.id == _record(store).holder.id
    first.release()
    assert _record(store).released
    _held(store).release()


def test_of_many_takers_one_holds(store: Store) -> None:
    barrier = threading.Barrier(6)

    def take(_: int) -> Lease | Holder:
        barrier.wait()
        return take_lease(store, lease_path(REF))

    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(take, range(6)))
    assert sum(isinstance(item, Lease) for item in taken) == 1


def test_the_heartbeat_renews(store: Store) -> None:
    beats = list[int]()
    lease = _held(store, lifetime=1.0).start(on_loss=lambda: None, on_renewal=lambda: beats.append(1))
    before = _record(store).expires_at
    deadline = time.monotonic() + 20
    while _record(store).renewals < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert _record(store).expires_at > before
    lease.release()
    assert len(beats) >= 2
    assert lease.lost == ""
    assert _record(store).released


def test_a_heartbeat_that_fails_stops_the_job(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    lost = threading.Event()

    def fail() -> None:
        raise AttributeError("a defect")

    lease = _held(store, lifetime=0.4).start(on_loss=lost.set, on_renewal=fail)
    assert lost.wait(20)
    with pytest.raises(StageError, match=r"^the heartbeat of the lease .* failed \(a defect\): this job stops"):
        lease.check()
    lease.release()
    assert "AttributeError: a defect" in capfd.readouterr().err


def test_one_that_ran_out_is_taken_over_and_its_holder_learns_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CLOCK_SKEW", timedelta(0))
    lost = threading.Event()
    first = _held(store, lifetime=0.4)
    time.sleep(0.5)
    second = _held(store)
    first.start(on_loss=lost.set)
    assert lost.wait(20)
    with pytest.raises(StageError, match="was taken by process"):
        first.check()
    first.release()
    assert not _record(store).released
    second.release()


def test_a_holder_elsewhere_counts_until_it_expires(store: Store) -> None:
    _write(store, ELSEWHERE, expires_in=30)
    assert take_lease(store, lease_path(REF)) == ELSEWHERE
    _write(store, ELSEWHERE, expires_in=-4)  # within what clocks may differ
    assert take_lease(store, lease_path(REF)) == ELSEWHERE
    _write(store, ELSEWHERE, expires_in=-6)
    _held(store).release()


def test_a_holder_that_died_on_this_machine_is_seen_at_once(store: Store) -> None:
    if not leases._machine():
        pytest.skip("this system does not tell machines apart")
    script = (
        "import sys\n"
        "from rlhf_core.artifacts.leases import lease_path, take_lease\n"
        "from rlhf_core.artifacts.manifest import ArtifactRef\n"
        "from rlhf_core.artifacts.opening import open_store\n"
        "take_lease(open_store(sys.argv[1]), lease_path(ArtifactRef(stage='sft', key='a' * 64)))\n"
    )
    subprocess.run([sys.executable, "-c", script, store.url], check=True)
    assert not _record(store).released
    _held(store).release()


def test_waiting_ends_when_the_other_lets_go_or_has_finished(store: Store) -> None:
    holder, told = _held(store), list[str]()
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_lease, store, REF, done=done.is_set, waiting=told.append)
        while not told:
            time.sleep(0.05)
        assert not waiting.done()
        holder.release()
        second = waiting.result(timeout=30)
        assert isinstance(second, Lease)
        waiting = pool.submit(wait_for_lease, store, REF, done=done.is_set, waiting=told.append)
        done.set()
        assert waiting.result(timeout=30) is None
        second.release()
    assert told[0].startswith("process ")


def test_a_lease_of_an_earlier_release_is_read(store: Store) -> None:
    _write(store, ELSEWHERE, expires_in=-6)
    old = _record(store).model_dump(mode="json") | {"taken_at": None, "seen_at": None, "earlier_seconds": 7.0}
    store.put(lease_path(REF), json.dumps(old).encode())
    _held(store).release()
