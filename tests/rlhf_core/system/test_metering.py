"""What processes take: memory at most, energy counters that wrap, tokens of judges."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_core.system.metering import (
    MachineEnergy,
    Meter,
    ModelUse,
    gpu_joules,
    peak_device_bytes,
    peak_host_bytes,
    reset_peak,
)

MB = 1 << 20


def _zone(root: Path, name: str, counter: int) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "energy_uj").write_text(f"{counter}\n")
    (root / name / "max_energy_range_uj").write_text("9999999\n")


def test_energy_is_that_of_all_packages_also_where_a_counter_wraps(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", 9_000_000)
    _zone(tmp_path, "intel-rapl:1", 1_000_000)
    _zone(tmp_path, "intel-rapl:0:0", 0)  # a part of the first
    energy = MachineEnergy(tmp_path)
    _zone(tmp_path, "intel-rapl:0", 1_000_000)
    _zone(tmp_path, "intel-rapl:1", 4_000_000)
    _zone(tmp_path, "intel-rapl:0:0", 5_000_000)
    assert energy.joules() == pytest.approx(2.0 + 3.0)
    _zone(tmp_path, "intel-rapl:1", 5_000_000)
    assert energy.joules() == pytest.approx(6.0)


def test_energy_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert MachineEnergy(tmp_path).joules() is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert MachineEnergy(tmp_path).joules() is None
    assert gpu_joules([]) == {}


def test_tokens_are_those_that_servers_report() -> None:
    meter = Meter()
    meter.judged("m", {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12})
    meter.judged("m", {"prompt_tokens": 5, "completion_tokens": 1})
    for strange in (None, "many", {"prompt_tokens": 5}, {"prompt_tokens": -1, "completion_tokens": 1}):
        meter.judged("m", strange)
    assert meter.snapshot()[0] == {"m": ModelUse(calls=6, unreported=4, prompt_tokens=15, completion_tokens=3)}


def test_the_peak_outlasts_the_memory() -> None:
    reset_peak()
    before = peak_host_bytes()
    held = bytearray(b"x" * (64 * MB))
    del held
    assert peak_host_bytes() - before > 50 * MB


def test_a_heartbeat_finds_no_device_memory_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # as far as an import has got: no attributes yet
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    assert peak_device_bytes() == 0
    monkeypatch.setitem(sys.modules, "torch.cuda", ModuleType("torch.cuda"))
    assert peak_device_bytes() == 0
