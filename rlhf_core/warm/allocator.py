"""The memory allocator of the warm process, which its forks inherit: jemalloc, as Ray ships it, keeping what is freed.

With the C library's own, each large tensor is mapped when it is made and unmapped when it is freed, and writing to it
faults on every page, in every step again. What keeping gains: docs/benchmarks.md. Fresh processes have the C library's.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path

# jemalloc's oversize_threshold: 0 is no arena of its own, without a cache, for allocations of 8 MiB and more.
_KEEPS = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"


def allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which to start a process that keeps freed memory; none where `environment` has an allocator
    already, or Ray comes without one."""
    ray = find_spec("ray")
    library = Path(ray.origin).parent / "core" / "libjemalloc.so" if ray and ray.origin else Path()
    if "LD_PRELOAD" in environment or not library.is_file():
        return {}
    return {"LD_PRELOAD": str(library), "MALLOC_CONF": _KEEPS}


def forget_allocator(environment: MutableMapping[str, str]) -> None:
    """Take those variables out, when they have done their work: no fork needs them, nor what it starts."""
    if environment.get("MALLOC_CONF") == _KEEPS:
        del environment["MALLOC_CONF"], environment["LD_PRELOAD"]
