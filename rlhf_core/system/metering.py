"""Memory, energy and tokens of judges that the processes of this job have taken so far. Each job starts from zero."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlhf_core.system.resources import nvml_handles

_POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The use of a process. joules: of each of its GPUs, while it had them."""

    host_bytes: int
    device_bytes: int
    joules: Mapping[str, float]


@dataclass(slots=True)
class ModelUse:
    """Calls of a judge's model; the tokens are those that its server reported."""

    calls: int = 0
    unreported: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Meter:
    """Any thread may write to it."""

    judges: dict[str, ModelUse] = field(default_factory=dict)
    processes: list[tuple[str, ProcessUse]] = field(default_factory=list)
    _waited: float = 0.0
    _waiting_since: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judged(self, model: str, usage: object) -> None:
        """Count a reply. usage: that of an OpenAI-compatible server, or what stands in its place."""
        reported = usage if isinstance(usage, dict) else {}
        prompt, completion = reported.get("prompt_tokens"), reported.get("completion_tokens")
        with self._lock:
            use = self.judges.setdefault(model, ModelUse())
            use.calls += 1
            if isinstance(prompt, int) and isinstance(completion, int) and min(prompt, completion) >= 0:
                use.prompt_tokens += prompt
                use.completion_tokens += completion
            else:
                use.unreported += 1

    def ended(self, process: str, use: ProcessUse) -> None:
        with self._lock:
            self.processes.append((process, use))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the context as waiting for room, during which nothing is reserved."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waited, self._waiting_since = self.waited, None

    @property
    def waited(self) -> float:
        since = self._waiting_since
        return self._waited + (0.0 if since is None else time.monotonic() - since)

    def snapshot(self) -> tuple[dict[str, ModelUse], list[tuple[str, ProcessUse]]]:
        with self._lock:
            judges = {
                model: ModelUse(use.calls, use.unreported, use.prompt_tokens, use.completion_tokens)
                for model, use in self.judges.items()
            }
            return judges, list(self.processes)

    def clear(self) -> None:
        with self._lock:
            self.judges.clear()
            self.processes.clear()
            self._waited, self._waiting_since = 0.0, None


METER = Meter()


def peak_host_bytes() -> int:
    """Return the most resident memory of this process, and of those below it that live, since each was started."""
    process = psutil.Process()
    return sum(_peak(each) for each in (process, *process.children(recursive=True)))


def reset_peak() -> None:
    """Reset the peak of this process, where the system can: several jobs may follow each other in one."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # then the peak is that of the process's life


def peak_device_bytes() -> int:
    """Return the most device memory that torch has reserved in this process; 0 without a GPU."""
    cuda = sys.modules.get("torch.cuda")
    is_initialized = getattr(cuda, "is_initialized", None)  # missing while another thread imports torch
    if cuda is None or is_initialized is None or not is_initialized():
        return 0
    return sum(cuda.max_memory_reserved(index) for index in range(cuda.device_count()))


def _peak(process: psutil.Process) -> int:
    try:
        # Not getrusage: its maximum includes that of the process which was forked, from before it became another.
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return int(process.memory_info().rss)
    except (OSError, psutil.Error):  # it has just ended
        return 0


class MachineEnergy:
    """The energy of all CPUs of this machine, whoever used them, by RAPL, whose counters wrap in minutes."""

    def __init__(self, root: Path = _POWERCAP) -> None:
        self._zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._last = self._read()
        self._joules = 0.0

    def joules(self) -> float | None:
        """Return the joules since this object was made; None if the machine does not tell."""
        now = self._read()
        if not self._last or now.keys() != self._last.keys():
            return None
        for zone, (counter, limit) in now.items():
            self._joules += ((counter - self._last[zone][0]) % (limit + 1)) / 1e6
        self._last = now
        return self._joules

    def _read(self) -> dict[str, tuple[int, int]]:
        """Return microjoules and the counter's limit of each package; empty if any cannot be read (often only root)."""
        try:
            return {
                zone.name: (_number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")) for zone in self._zones
            }
        except (OSError, ValueError):
            return {}


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


def gpu_joules(gpus: Iterable[str]) -> dict[str, float]:
    """Return the energy counters of GPUs by their UUIDs, of those that tell. gpus: as in CUDA_VISIBLE_DEVICES."""
    joules = {}
    with nvml_handles(gpus) as (nvml, handles):
        for handle in handles:
            millijoules, uuid = ctypes.c_ulonglong(), ctypes.create_string_buffer(96)
            if (
                nvml.nvmlDeviceGetUUID(handle, uuid, 96) == 0
                and nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) == 0
            ):
                joules[uuid.value.decode()] = millijoules.value / 1e3
    return joules
