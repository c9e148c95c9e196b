"""Return of freed memory from the allocator to the kernel."""

from __future__ import annotations

import ctypes

_LEAST = 2**28  # bytes: less is not worth the time in which a small model makes a step
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Usage(ctypes.Structure):
    """glibc's mallinfo2; `fordblks` are the bytes in free blocks, including returned pages."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def return_freed_memory() -> None:
    """Return freed memory to the kernel, if it is much, for other processes while this one waits.

    glibc keeps the memory that a thread has freed for its next allocations: after a step of a model with 135M
    parameters on CPU, as much again as is in use. Takes up to tenths of a second; a no-op with another C library.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    libc.mallinfo2.restype = _Usage
    if libc.mallinfo2().fordblks >= _LEAST:
        libc.malloc_trim(0)
