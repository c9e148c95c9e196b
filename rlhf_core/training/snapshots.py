"""Uploads of a rank: its part of a checkpoint, and the trained model if the job's driver is on another node.

State is copied to host memory first, so that training continues while the checkpoint is written.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.artifacts.checkpoints import Checkpoint, CheckpointFile
from rlhf_core.contract import StageContext
from rlhf_core.errors import IntegrityError
from rlhf_core.mesh import current_mesh
from rlhf_core.training.group import host_memory_only
from rlhf_core.training.randomness import load_random_state, random_state
from rlhf_core.training.state import RankState, Stateful

SHARED = "shared.safetensors"  # state that is equal on all ranks, written by rank 0


class HostCopy:
    """Copies of tensors in host memory, in buffers that are reused: pages already mapped are filled faster."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of `tensors`, valid until the next call."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer


class SnapshotWorker(ABC):
    """A rank whose state can be saved and restored. Every rank must call every method."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._rank = current_mesh().rank
        self._shared, self._own = HostCopy(), HostCopy()
        self._copied = self._fetched = RankState()

    @abstractmethod
    def parts(self) -> Mapping[str, Stateful]:
        """Return the state that the next step depends on, by name, except the random generators."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained model to `folder` on rank 0's node. Every rank must call it."""

    def hand_over(self, folder: Path, write: Callable[[Any, Path], None] | None = None) -> Mapping[str, str]:
        """Save the trained model to `folder`, in the driver's working folder. Every rank must call it.

        write: the method that saves; None: `save`. Returns an empty mapping, or, if the driver's working folder is on
        another node, the files that rank 0 has uploaded for StageContext.get_files.
        """
        write = write or type(self).save
        if folder.parent.is_dir():
            write(self, folder)
            return {}
        written = self._context.workdir / folder.name
        write(self, written)
        if self._rank != 0:
            return {}
        files = self._context.put_files(written)
        shutil.rmtree(written)
        return files

    @host_memory_only
    def copy_state(self) -> None:
        """Copy the state to host memory. Training may continue as soon as this returns."""
        shared: dict[str, Tensor] = {}
        own = {f"random.{name}": tensor for name, tensor in random_state().items()}
        for part, stateful in self.parts().items():
            state = stateful.state()
            shared |= {f"{part}.{name}": tensor for name, tensor in state.shared.items()}
            own |= {f"{part}.{name}": tensor for name, tensor in state.own.items()}
        keeps_shared = self._rank == 0
        self._copied = RankState(self._shared.take(shared) if keeps_shared else {}, self._own.take(own))

    @host_memory_only
    def write_state(self, name: str) -> list[CheckpointFile]:
        """Upload the state copied by `copy_state` to the checkpoint `name`. May run in a thread during training."""
        files = {_own_file(self._rank): self._copied.own}
        if self._rank == 0:
            files[SHARED] = self._copied.shared
        entries = []
        for file, tensors in files.items():
            path = self._context.workdir / f"writing-{file}"
            try:
                save_file(tensors, path)
                entries.append(self._context.checkpoints.add(name, file, path))
            finally:
                path.unlink(missing_ok=True)
        return entries

    @host_memory_only
    def fetch_state(self, checkpoint: Checkpoint) -> str:
        """Download this rank's part of `checkpoint` without loading it. Returns its damage, or an empty string."""
        loaded = []
        for file in (SHARED, _own_file(self._rank)):
            path = self._context.workdir / f"restoring-{self._rank}-{file}"
            try:
                self._context.checkpoints.fetch(checkpoint, file, path)
            except IntegrityError as error:
                return str(error)
            loaded.append(load_file(path))
            path.unlink()
        self._fetched = RankState(*loaded)
        return ""

    def restore_state(self) -> None:
        """Load the state downloaded by `fetch_state`. Raises StageError if it does not fit this run."""
        fetched, self._fetched = self._fetched, RankState()
        for part, stateful in self.parts().items():
            stateful.load_state(RankState(_below(part, fetched.shared), _below(part, fetched.own)))
        load_random_state(_below("random", fetched.own))


def _own_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(f"{part}."): tensor for n, tensor in tensors.items() if n.startswith(f"{part}.")}
