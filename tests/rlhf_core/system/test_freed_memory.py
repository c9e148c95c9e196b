"""Memory that was freed goes back to the kernel."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from rlhf_core.system import freed_memory
from rlhf_core.system.freed_memory import return_freed_memory

pytestmark = pytest.mark.endurance("benchmarks")

BLOCK, BLOCKS = 100_000, 4000  # too small for mappings of their own; too many to be kept


def resident() -> int:
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def freed_blocks() -> list[bytes]:
    """What is still in use: one in ten of the blocks in a stretch of memory, the others of which were freed."""
    blocks = [bytes(bytearray(b"x") * BLOCK) for _ in range(BLOCKS)]
    in_use = blocks[::10]
    blocks.clear()
    gc.collect()
    return in_use


def test_what_lies_between_blocks_in_use_is_returned() -> None:
    in_use = freed_blocks()
    before = resident()
    return_freed_memory()
    assert resident() < before - BLOCK * BLOCKS / 2
    assert in_use[-1] == b"x" * BLOCK


def test_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_LEAST", 2**40)
    in_use, before = freed_blocks(), resident()
    return_freed_memory()
    assert resident() > before - BLOCK * BLOCKS / 10
    assert in_use
