"""Real Ray actors and real gloo: calls, failures, and what is reserved."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
import ray
import torch
import torch.distributed as dist
from ray.cloudpickle import register_pickle_by_value

from rlhf_core.actors.calls import ASIDE, _cause_of_death, wait
from rlhf_core.actors.placement import reserve
from rlhf_core.actors.resources import ActorResources
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.engines.placement import Placement
from rlhf_core.errors import RewardError, StageError
from rlhf_core.system.metering import METER

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("ray_cluster")]
register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test module

HALVES = Placement(workers=2, cpus_per_worker=0.5)


class Worker:
    """What the tests ask of a rank."""

    def __init__(self, offset: int = 0, fail_at_start: int | None = None) -> None:
        self.rank = dist.get_rank()
        self.offset = offset
        self.added = threading.Event()
        self.told = threading.Event()
        if fail_at_start == self.rank:
            raise ValueError("cannot be built")

    def identity(self) -> tuple[int, int, int, str]:
        return self.rank, dist.get_world_size(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def timeout(self) -> timedelta:
        assert dist.group.WORLD is not None
        found: timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        return found

    def add(self, shard: int, extra: int) -> int:
        total = torch.tensor(shard + extra + self.offset)
        dist.all_reduce(total)
        self.total = int(total)
        self.added.set()
        return self.total

    def wait_for_add(self) -> int:
        assert self.added.wait(30)
        return self.total

    def wait_until_told(self) -> None:
        assert self.told.wait(60)

    def tell(self) -> None:
        self.told.set()

    def die(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)
        dist.barrier()

    def refuse(self, rank: int) -> None:
        if self.rank == rank:
            raise RewardError("reward.py returned 3 values for 4 completions")

    def fail_beside_a_barrier(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("margin")
        dist.barrier()


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup[Worker]]:
    started = RayWorkerGroup(Placement(workers=2, cpus_per_worker=0.5, threads=3, timeout_minutes=7), Worker, 100)
    yield started
    started.shutdown()


@pytest.mark.slow("the first of its file, for which ranks start")
def test_each_rank_knows_its_place_and_its_threads(group: RayWorkerGroup[Worker]) -> None:
    assert group.size == 2
    assert group.call(Worker.identity) == [(0, 2, 3, "3"), (1, 2, 3, "3")]


def test_a_collective_operation_has_the_timeout_of_the_placement(group: RayWorkerGroup[Worker]) -> None:
    assert group.call(Worker.timeout) == [timedelta(minutes=7)] * 2


def test_scatter_gives_each_rank_its_shard_and_all_the_rest(group: RayWorkerGroup[Worker]) -> None:
    assert group.scatter(Worker.add, [1, 2], 1000) == [2203, 2203]
    with pytest.raises(ValueError, match="add: 3 shards for 2 replicas"):
        group.scatter(Worker.add, [1, 2, 3], 0)
    sent = group.put([1, 2])
    assert all(isinstance(shard, ray.ObjectRef) for shard in sent)
    assert [group.scatter(Worker.add, sent, 1000) for _ in range(2)] == [[2203, 2203]] * 2


@pytest.mark.endurance("rl-matrix")
def test_ranks_of_one_replica_get_the_same_shard() -> None:
    group = RayWorkerGroup(HALVES, Worker, tensor=2)
    try:
        assert (group.size, group.replicas) == (2, 1)
        assert group.scatter(Worker.add, [3], 10) == group.scatter(Worker.add, group.put([3]), 10) == [26]
        with pytest.raises(ValueError, match="add: 2 shards for 1 replicas"):
            group.scatter(Worker.add, [1, 2], 0)
    finally:
        group.shutdown()


def test_a_call_aside_runs_beside_the_others(group: RayWorkerGroup[Worker]) -> None:
    waiting = group.aside(Worker.wait_for_add)
    assert group.scatter(Worker.add, [1, 2], 1000) == [2203, 2203]
    assert waiting() == [2203, 2203]
    failing = group.aside(Worker.refuse, 1)
    with pytest.raises(RewardError, match=r"^rank 1: reward.py"):
        failing()


def test_calls_that_never_end_without_others_fail_with_them(group: RayWorkerGroup[Worker]) -> None:
    waiting = group.begin(Worker.wait_until_told)
    sending = group._start(Worker.refuse, [()] * 2, (1,), {}, thread=ASIDE)
    with pytest.raises(RewardError, match=r"^rank 1: reward.py"):
        wait("load", waiting.calls, 30.0, needed=sending)
    group.aside(Worker.tell)()
    assert len(wait("load", waiting.calls)) == 2


def test_a_rank_that_computes_says_what_it_uses(group: RayWorkerGroup[Worker]) -> None:
    waiting = group.begin(Worker.wait_until_told)
    resources = ActorResources()
    assert sorted(resources.samples()) == sorted(resources.samples()) == ["rank 0", "rank 1"]
    group.aside(Worker.tell)()
    waiting.results()


def test_two_groups_share_a_reservation_and_tell_their_peaks_when_they_leave(ray_cluster: None) -> None:
    METER.clear()
    before = ActorResources().samples()  # of this file's own group, if it lives
    with reserve([{"CPU": 0.25}, {"CPU": 0.5}]) as both, ExitStack() as stack:
        groups = [
            RayWorkerGroup(Placement(cpus_per_worker=cpus), Worker, placement_group=both, first_bundle=bundle)
            for bundle, cpus in enumerate([0.25, 0.5])
        ]
        for group in groups:
            stack.callback(group.shutdown)
        assert [group.scatter(Worker.add, [1], 10) for group in groups] == [[11], [11]]
        samples = ActorResources().samples()
        assert len(samples.keys() - before.keys()) == 2
        assert all(sample.host_bytes > 100 << 20 for sample in samples.values())
    assert ActorResources().samples().keys() == before.keys()
    _, left = METER.snapshot()
    assert [name for name, _ in left] == ["rank 0", "rank 0"]
    assert all(use.host_bytes > 100 << 20 and use.device_bytes == 0 and not use.joules for _, use in left)


def test_an_error_of_ours_keeps_its_type_and_names_the_rank(group: RayWorkerGroup[Worker]) -> None:
    with pytest.raises(RewardError, match=r"^rank 1: reward.py returned 3 values for 4 completions$"):
        group.call(Worker.refuse, 1)


def test_a_rank_that_dies_is_named_though_the_other_complains_too() -> None:
    group = RayWorkerGroup(HALVES, Worker)
    try:
        with pytest.raises(StageError, match=r"^rank 1 died in die: its process .*\. Ray says: "):
            group.call(Worker.die, 1)
    finally:
        group.shutdown()


@pytest.mark.endurance("chaos")
@pytest.mark.slow("a rank hangs until its time is over")
def test_a_failing_call_names_the_rank_though_rank_0_hangs_and_then_rank_0() -> None:
    group = RayWorkerGroup(HALVES, Worker, timeout=3)
    try:
        with pytest.raises(StageError, match=r"^rank 1 failed in fail_beside_a_barrier: KeyError: 'margin'"):
            group.call(Worker.fail_beside_a_barrier, 1)
        with pytest.raises(StageError, match=r"^identity: no answer from rank 0 within 3 s$"):
            group.call(Worker.identity)
    finally:
        group.shutdown()


def test_a_worker_that_cannot_be_built_gives_everything_back() -> None:
    with pytest.raises(StageError, match=r"^rank 1 failed in start: ValueError: cannot be built"):
        RayWorkerGroup(Placement(workers=2, cpus_per_worker=1.5), Worker, 0, 1)
    with reserve([{"CPU": 3.0}]):
        pass


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("Task was killed due to the node running low on memory.", "Ray ended it because its node ran low on memory"),
        ("The actor died because its node has died.", "its node was lost"),
        (
            "The actor f2 is unavailable: RpcError: RPC error: keepalive watchdog timeout",
            "Ray does not reach its process",
        ),
        ("The worker died with exit code -9", "its process was killed (signal 9)"),
        ("The actor died unexpectedly before finishing this task.", "its process was killed, usually because memory"),
    ],
)
def test_what_ray_says_of_a_death_follows_the_likely_cause(message: str, cause: str) -> None:
    described = _cause_of_death(message)
    assert described.startswith(cause)
    assert described.endswith(f". Ray says: {message}")
