# ruff: noqa: N802  the names are NVIDIA's
"""Cores and memory of a process with its children, and what NVIDIA's library tells of its GPUs."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from typing import Any

import pytest

from rlhf_core.system.resources import ProcessTree, gpu_uses

pytestmark = pytest.mark.parts

MB = 1 << 20
HOLDS = "import sys; held = b'x' * (100 << 20); print(flush=True); sys.stdin.read()"
BURNS = "import time; print(flush=True); end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def started(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_the_memory_of_children_counts_while_they_live() -> None:
    tree = ProcessTree()
    before = tree.sample().host_bytes
    with started(HOLDS) as process:
        assert tree.sample().host_bytes - before > 90 * MB
        process.communicate("")
    assert tree.sample().host_bytes - before < 50 * MB


def test_cores_are_the_seconds_of_the_process_and_of_children_that_have_ended() -> None:
    tree = ProcessTree()
    began = time.monotonic()
    with started(BURNS):
        pass
    sample = tree.sample()
    assert sample.cores * (time.monotonic() - began) > 0.45
    time.sleep(0.3)
    assert tree.sample().cores < 0.5
    assert (sample.gpu_share, sample.gpu_bytes) == (None, None)


class Library:
    """Two GPUs, of which the second tells nothing."""

    def __init__(self, name: str) -> None:
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 1
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        rates._obj.gpu = 75
        return 0 if handle.value == 1 else 3

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = 5 * MB
        return 0


def test_gpus_tell_how_busy_they_are_and_what_is_used_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library("")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert list(gpu_uses(["0", "1", "GPU-1", "GPU-9"])) == [(0.75, 5 * MB)] * 2
    assert library.open == 0
    sample = ProcessTree(["0", "GPU-1"]).sample()
    assert (sample.gpu_share, sample.gpu_bytes) == (0.75, 10 * MB)
