"""Memory and CPU share of a process and its descendants. Linux only."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil


class ProcessWatch:
    """Samples the tree of processes under `pid` every `interval` seconds, from the start of the context to its end.

    A sample costs up to tenths of a second, and blocks a watched process while it maps new memory: a short interval
    slows a side with many processes.
    """

    def __init__(self, pid: int, interval: float = 10.0) -> None:
        self.peak = 0  # bytes: the largest sum of resident memory, pages that several processes share counted once
        self.at_peak: dict[str, int] = {}  # bytes of each program then
        self.peak_anonymous = 0  # bytes: likewise, without pages of files, which the kernel may take back
        self._root = psutil.Process(pid)
        self._interval = interval
        self._worked: dict[int, float] = {}  # processor seconds of each process, as last seen
        self._seen: list[tuple[float, float]] = []  # when, and processor seconds of all other programs until then
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def others(self, began: float, ended: float) -> float:
        """Return the share of the machine that other programs used between two times of `time.perf_counter`.

        That clock is the machine's, the same in all its processes. Raises ValueError if there were not two samples.
        """
        first = next((seen for seen in reversed(self._seen) if seen[0] <= began), self._seen[0])
        last = next((seen for seen in self._seen if seen[0] >= ended), self._seen[-1])
        if first is last:
            raise ValueError(f"{ended - began:.0f} s are too few to know who used the machine: measure more steps")
        return float(max(0.0, last[1] - first[1]) / ((last[0] - first[0]) * psutil.cpu_count()))

    def _watch(self) -> None:
        self._sample()
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return  # it has just ended
        memory: dict[str, int] = defaultdict(int)
        anonymous = 0
        for process in tree:
            try:
                times = process.cpu_times()
                self._worked[process.pid] = times.user + times.system
                resident = _proportional(process.pid)
                memory[_program(process)] += resident["Pss"]
                anonymous += resident["Pss_Anon"]
            except (psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError, ProcessLookupError):
                continue  # it has ended while we looked
        self._seen.append((time.perf_counter(), busy_seconds() - sum(self._worked.values())))
        self.peak_anonymous = max(self.peak_anonymous, anonymous)
        if sum(memory.values()) > self.peak:
            self.peak, self.at_peak = sum(memory.values()), dict(memory)


def _program(process: psutil.Process) -> str:
    """Return `ray::EngineActor` for a Ray actor, whatever method it is in; the file's name for any other program."""
    title = (process.cmdline() or [process.name()])[0]
    return title.split(".")[0] if title.startswith("ray::") else Path(title).name


def _proportional(pid: int) -> dict[str, int]:
    """Return bytes by the kernel's names, with each page divided among the processes that share it."""
    _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return {name: int(size.split()[0]) * 1024 for name, size in (line.split(":") for line in lines)}


def busy_seconds() -> float:
    """Return the processor seconds of all programs since the machine's start."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
