"""Cores, memory and GPUs that a process uses now, with the processes that it has started."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Sample:
    """cores: CPU seconds a second since the last sample; host_bytes: resident, pages that two processes share twice."""

    cores: float
    host_bytes: int
    gpu_share: float | None = None  # of its GPUs, how busy, by whomever; None: it has none, or they do not tell
    gpu_bytes: int | None = None  # used on them, likewise


class ProcessTree:
    """This process and those below it. Each sample is of the time since the last one; one thread may take them."""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        """gpus: of this process, as in CUDA_VISIBLE_DEVICES."""
        self._gpus = list(gpus)
        self._process = psutil.Process()
        self._at, self._seconds = time.monotonic(), 0.0
        self._seconds, _ = self._look()

    def sample(self) -> Sample:
        seconds, host_bytes = self._look()
        now = time.monotonic()
        # A child that has just ended may be counted by nobody for a moment.
        cores = max(0.0, seconds - self._seconds) / max(now - self._at, 1e-3)
        self._at, self._seconds = now, seconds
        uses = list(gpu_uses(self._gpus))
        if not uses:
            return Sample(cores, host_bytes)
        return Sample(cores, host_bytes, sum(share for share, _ in uses) / len(uses), sum(used for _, used in uses))

    def _look(self) -> tuple[float, int]:
        """Return CPU seconds and resident bytes. The seconds of children that have ended are their parents'."""
        seconds, host_bytes = 0.0, 0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
            except psutil.Error:  # it has just ended
                continue
            seconds += times.user + times.system + times.children_user + times.children_system
            host_bytes += memory.rss
        return seconds, host_bytes


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_uses(gpus: Iterable[str]) -> Iterator[tuple[float, int]]:
    """Yield how busy each GPU is, from 0 to 1, and the bytes that are used on it, of those that tell."""
    with nvml_handles(gpus) as (nvml, handles):
        for handle in handles:
            busy, memory = _Utilization(), _Memory()
            if (
                nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)) == 0
                and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            ):
                yield busy.gpu / 100, memory.used


@contextmanager
def nvml_handles(gpus: Iterable[str]) -> Iterator[tuple[ctypes.CDLL, list[ctypes.c_void_p]]]:
    """Yield NVIDIA's library and its handles of GPUs, as in CUDA_VISIBLE_DEVICES; none where it is missing."""
    wanted = list(gpus)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1") if wanted else None
    except OSError:
        nvml = None
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield ctypes.CDLL(None), []
        return
    handles = []
    for gpu in wanted:
        handle = ctypes.c_void_p()
        found = (
            nvml.nvmlDeviceGetHandleByIndex_v2(int(gpu), ctypes.byref(handle))
            if gpu.isdecimal()
            else nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(handle))
        )
        if found == 0:
            handles.append(handle)
    try:
        yield nvml, handles
    finally:
        nvml.nvmlShutdown()
