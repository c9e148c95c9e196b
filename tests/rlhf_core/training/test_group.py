"""The group of one rank in this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import psutil
import pytest
import torch
import torch.distributed as dist

from rlhf_core.training.distributed import host_store, interface_towards, join_group
from rlhf_core.training.group import InlineGroup, WorkerGroup

pytestmark = pytest.mark.system


class Worker:
    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.added = threading.Event()
        self.sum = 0

    def add(self, a: int, b: int = 0) -> int:
        self.sum = a + b + self.offset
        self.added.set()
        return self.sum

    def wait_for_add(self) -> int:
        assert self.added.wait(20)
        return self.sum


def test_one_rank_answers_as_a_list_of_one() -> None:
    group: WorkerGroup[Worker] = InlineGroup(Worker, 100)
    assert group.size == group.replicas == 1
    assert dist.get_world_size() == 1
    assert group.call(Worker.add, 1, 2) == [103]
    assert group.scatter(Worker.add, [5], 1) == [106]
    with pytest.raises(ValueError, match="add: 2 shards for 1 replica"):
        group.scatter(Worker.add, [5, 6], 1)
    group.shutdown()


def test_a_process_cannot_be_two_ranks() -> None:
    join_group(rank=0, size=1)
    join_group(rank=0, size=1)
    with pytest.raises(RuntimeError, match="this process is rank 0 of 1 already"):
        join_group(rank=1, size=2, address="127.0.0.1:1")


JOIN = """
import atexit, os, sys, torch, torch.distributed as dist
atexit.register(lambda: print("in the group" if dist.is_initialized() else "left"))  # runs last
from rlhf_core.training.distributed import join_group
join_group(rank=int(sys.argv[1]), size=2, address=sys.argv[2])
total = torch.tensor(10 + dist.get_rank())
dist.all_reduce(total)
print(int(total), dist.get_backend(), os.environ.get("GLOO_SOCKET_IFNAME"))
"""


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="gloo, and Linux's name of loopback")
def test_two_processes_meet_on_loopback_stay_there_and_leave() -> None:
    store = host_store("127.0.0.1")
    address = f"127.0.0.1:{store.port}"
    environment = {name: v for name, v in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} | {"PYTHONPATH": "."}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, str(rank), address], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].split() for rank in ranks] == [["21", "gloo", "lo", "left"]] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_a_store_holds_its_port_and_listens_at_its_host_alone() -> None:
    store = host_store("127.0.0.1")
    with pytest.raises(OSError, match="in use"):
        host_store("127.0.0.1", store.port)
    listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.laddr.port == store.port
                 and each.status == psutil.CONN_LISTEN]  # fmt: skip
    assert listening == ["127.0.0.1"]


def test_gloo_uses_the_interface_that_leads_to_rank_0() -> None:
    addresses = {a.address: name for name, all_of_it in psutil.net_if_addrs().items() for a in all_of_it
                 if a.family == socket.AF_INET}  # fmt: skip
    assert addresses
    for address, name in addresses.items():
        assert interface_towards(f"{address}:29500") == name
    assert interface_towards("not an address:29500") is None


def test_a_call_aside_runs_beside_the_others_and_keeps_its_error() -> None:
    group: WorkerGroup[Worker] = InlineGroup(Worker, 100)
    waiting = group.aside(Worker.wait_for_add)
    assert group.call(Worker.add, 1, 2) == [103]
    assert waiting() == [103]
    failing = group.aside(Worker.add, "no number")
    with pytest.raises(TypeError):
        failing()
