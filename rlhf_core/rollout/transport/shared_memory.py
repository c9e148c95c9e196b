"""Buffers that two processes of one machine map: memory of a GPU by its CUDA IPC handle, else main memory by a file
descriptor.

A descriptor of `memfd_create` has no name in /dev/shm, whose size containers limit, and its memory is freed with the
last process that maps it, however that ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Handle:
    """Fields for JSON and file descriptors for a socket, with which another process opens a buffer."""

    fields: Sequence[int | str]
    descriptors: Sequence[int] = ()


class SharedBuffer:
    """Memory of `size` bytes that other processes open by its handle; `tensor` is uint8."""

    def __init__(self, size: int, device: Device) -> None:
        """Raises OSError if there is no room in main memory, torch.OutOfMemoryError if there is none on the GPU."""
        self.size, self._descriptor = size, -1
        if device == "cuda":
            self.tensor = torch.empty(size, dtype=torch.uint8, device=current_device(device))
            return
        self._descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # or a write to a page without memory would be a SIGBUS
            self.tensor = _mapped(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def handle(self) -> Handle:
        """Return a handle for one process: CUDA counts those that have not freed the buffer by the handles made."""
        if self._descriptor >= 0:
            return Handle([self.size], [self._descriptor])
        # torch has no public name for handles without pickles (torch.multiprocessing.reductions does the same).
        _, memory, size, offset, counter, counter_offset, event, waits = self.tensor.untyped_storage()._share_cuda_()
        return Handle([memory.hex(), size, offset, counter.hex(), counter_offset, event.hex(), int(waits)])

    def close(self) -> None:
        """Free the buffer. Processes that have opened it keep its memory until they free it too."""
        del self.tensor
        if self._descriptor >= 0:
            os.close(self._descriptor)
        else:
            torch.cuda.ipc_collect()


def opened(handle: Handle, device: Device) -> Tensor:
    """Return the buffer of `handle`, uint8. Closes the descriptors, which are not needed any more."""
    if device == "cpu":
        (size,), (descriptor,) = handle.fields, handle.descriptors
        try:
            return _mapped(descriptor, int(size))
        finally:
            os.close(descriptor)
    memory, size, offset, counter, counter_offset, event, waits = handle.fields
    shared: Any = torch.UntypedStorage._new_shared_cuda(
        current_device(device).index, bytes.fromhex(str(memory)), size, offset, bytes.fromhex(str(counter)),
        counter_offset, bytes.fromhex(str(event)), bool(waits),
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=shared.device).set_(shared)


def current_device(device: Device) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.init()
    return torch.device("cuda", torch.cuda.current_device())


def identity(device: Device) -> str:
    """Return the name by which two processes know that they have the same device."""
    if device == "cpu":
        return "cpu"
    return str(torch.cuda.get_device_properties(current_device(device)).uuid)


def synchronize(device: Device) -> None:
    """Wait until what was written to a buffer can be read by other processes, and what was read is read."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def _mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
