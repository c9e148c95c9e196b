"""The processes of test_transport.py: `python -m tests.rlhf_core.rollout.broadcasts collective`, or ipc.

A rank sends to two engines, each in a process of its own, undisturbed and with each of some faults; prints as JSON how
each process ended, and after how many seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from queue import Empty
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export its type

from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.transport.base import WeightManifest, digested
from rlhf_core.rollout.transport.collective import Collective
from rlhf_core.rollout.transport.ipc import SharedBuffers

Ends = Collective | SharedBuffers
SECONDS = 12.0  # that a process is waited for
FAULTS = (
    "none", "rank raises", "rank hangs", "rank is killed", "engine raises", "engine is killed", "engine is absent",
    "other weights",
)  # fmt: skip


def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    tensors = {f"t{i}": torch.randn(30, 40).mul(100).to(dtypes[i % 3]) for i in range(9)}
    return tensors | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(True), "turned": torch.randn(5, 3).T}


def sent(fault: str) -> Iterator[tuple[str, Tensor]]:
    for index, (name, tensor) in enumerate(state().items()):
        if index == 5:
            _fail("rank", fault)
        yield "unknown" if index == 5 and fault == "other weights" else name, tensor


def _fail(who: str, fault: str) -> None:
    if fault == f"{who} raises":
        raise ValueError(f"a fault of the {who}")
    if fault == f"{who} is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == f"{who} hangs":
        time.sleep(4 * SECONDS)


def rank(transport: Ends, fault: str, offered: Any) -> dict[str, str]:
    digests: dict[str, str] = {}
    with transport.listening() if isinstance(transport, SharedBuffers) else nullcontext():
        offered.set()
        transport.send(digested(sent(fault), digests), WeightManifest.of(1, state()))
    return digests


def engine(transport: Ends, fault: str, offered: Any) -> dict[str, str]:
    manifest = WeightManifest.of(1, state())
    if transport.engine == 1 and fault == "engine is absent":
        return {}
    offered.wait()
    received = {}
    for index, (name, tensor) in enumerate(transport.receive(manifest)):
        if transport.engine == 1:
            if index == 5:
                _fail("engine", fault)
            time.sleep(0.02)  # longer than the rank takes to fill all of its buffers again
        received[name] = tensor_digest(tensor)
    return received


def _ended(who: str, transport: Ends, fault: str, offered: Any, answers: Any) -> None:
    began = time.monotonic()
    try:
        found: Any = (rank if who == "rank" else engine)(transport, fault, offered)
    except Exception as error:  # what the test looks at
        found = f"{type(error).__name__}: {error}"
    answers.put((who, found, time.monotonic() - began))


class Scenario:
    """The three processes of one fault, from the start."""

    def __init__(self, kind: str, fault: str) -> None:
        context = multiprocessing.get_context("fork")
        self._fault, self._answers, offered = fault, context.Queue(), context.Event()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = f"127.0.0.1:{self._store.port}"
        transport: Ends = Collective(address, "gloo", engines=2, workers=1, timeout_seconds=SECONDS)
        if kind == "ipc":  # with buffers smaller than a tensor
            name = f"{os.getpid()} {fault}"
            transport = SharedBuffers(name, "cpu", 2, 1, timeout_seconds=SECONDS, buffer_bytes=1001)
        ends = {"rank": transport, **{f"engine {index}": transport.for_engine(index) for index in (0, 1)}}
        self._processes = [
            context.Process(target=_ended, args=(who, end, fault, offered, self._answers)) for who, end in ends.items()
        ]
        for process in self._processes:
            process.start()

    def ends(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        try:
            while len(found) < (2 if "killed" in self._fault or "hangs" in self._fault else 3):
                who, answer, seconds = self._answers.get(timeout=4 * SECONDS)
                found[who] = [answer, seconds]
        except Empty:
            pass  # the test names who is missing
        for process in self._processes:
            process.kill()
            process.join()
        return found


def main(kind: str) -> None:
    torch.set_num_threads(1)
    scenarios = {fault: Scenario(kind, fault) for fault in FAULTS}  # together, since they wait
    print(json.dumps({fault: scenario.ends() for fault, scenario in scenarios.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
