"""Who follows a job, when two runs follow one, and what each may stop."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.opening import open_store
from rlhf_core.errors import IntegrityError
from tasks.followers import Follower, FollowersRecord
from tasks.job_request import id_prefix

pytestmark = pytest.mark.parts

PREFIX = "sft-0123456789abcdef-01234567-a"
JOB = f"{PREFIX}1"
EMPTY = FollowersRecord().model_dump_json(indent=1).encode()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_only_the_last_to_leave_stops_the_job(store: LocalStore) -> None:
    first, second = Follower(store, PREFIX, "first"), Follower(store, PREFIX, "second")
    assert (first.join(), second.join()) == ("", "")
    assert not first.leave_and_stop(JOB)
    assert second.leave_and_stop(JOB)
    assert Follower(store, PREFIX, "third").join() == JOB


def test_a_run_that_does_not_follow_stops_nothing_and_forgets_nobody(store: LocalStore) -> None:
    lost = Follower(store, PREFIX, "lost", timedelta(days=-1))  # its process has died, nobody else has come
    lost.join()
    assert not Follower(store, PREFIX, "another").leave_and_stop(JOB)
    assert lost.leave_and_stop(JOB)


def test_a_run_whose_process_died_keeps_no_job_alive(store: LocalStore) -> None:
    Follower(store, PREFIX, "lost", timedelta(days=-1)).join()
    follower = Follower(store, PREFIX, "alive")
    follower.join()
    assert follower.leave_and_stop(JOB)


def test_a_follower_is_renewed(store: LocalStore) -> None:
    with Follower(store, PREFIX, "first", timedelta(seconds=0.2)) as first:
        first.join()
        before = store.get(f"followers/{PREFIX.removesuffix('-a')}.json")
        while store.get(f"followers/{PREFIX.removesuffix('-a')}.json") == before:
            time.sleep(0.05)


def test_a_renewal_at_the_same_time_does_not_undo_that_a_run_leaves(store: LocalStore) -> None:
    for number in range(40):
        with Follower(store, PREFIX, f"run {number}", timedelta(milliseconds=1)) as follower:
            follower.join()
            follower.leave()
            time.sleep(0.005)
        assert store.get(f"followers/{PREFIX.removesuffix('-a')}.json") == EMPTY


@pytest.mark.endurance("chaos")
@pytest.mark.parametrize("store_url", ["local", "s3"], indirect=True)
def test_when_all_leave_at_once_one_stops(store_url: str) -> None:
    followers = [Follower(open_store(store_url), PREFIX, f"run {number}") for number in range(6)]
    with ThreadPoolExecutor(len(followers)) as threads:
        list(threads.map(Follower.join, followers))
        assert sum(threads.map(lambda follower: follower.leave_and_stop(JOB), followers)) >= 1
    with ThreadPoolExecutor(len(followers)) as threads:
        list(threads.map(Follower.join, followers[1:]))
        assert not any(threads.map(lambda follower: follower.leave_and_stop(JOB), followers[2:]))


def test_a_damaged_record_is_said(store: LocalStore) -> None:
    store.put(f"followers/{PREFIX.removesuffix('-a')}.json", b"{}}")
    with pytest.raises(IntegrityError, match="does not list the followers of a job"):
        Follower(store, PREFIX, "first").join()


def test_the_prefix_of_a_job() -> None:
    assert id_prefix(f"{PREFIX}12") == PREFIX
