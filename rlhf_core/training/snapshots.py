"""Uploads of a rank: its part of a checkpoint, and the trained model if the job's driver is on another node.

State is copied to host memory first, so that training continues while the checkpoint is written.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.artifacts.checkpoints import Checkpoint, CheckpointFile
from rlhf_core.contract import StageContext
from rlhf_core.errors import IntegrityError, StageError
from rlhf_core.mesh import current_mesh
from rlhf_core.training.group import host_memory_only
from rlhf_core.training.randomness import load_random_state, random_state
from rlhf_core.training.redivision import layout_json, layout_of, read_layout, redivided, same_weights, without_layout
from rlhf_core.training.state import Layout, RankState, Stateful

_TENSORS = ".safetensors"
SHARED = f"shared{_TENSORS}"


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

    def __init__(self, context: StageContext, name: str = "") -> None:
        """name: of this group of ranks, if the run has several with state of their own."""
        self._context = context
        self._name = name
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
        state = self._state()
        random = {f"random.{name}": tensor for name, tensor in random_state().items()}
        shared = self._shared.take(state.shared) if self._rank == 0 else {}
        self._copied = RankState(shared, self._own.take({**state.own, **random}), state.layout)

    @host_memory_only
    def write_state(self, name: str) -> list[CheckpointFile]:
        """Upload the state copied by `copy_state` to the checkpoint `name`. May run in a thread during training."""
        files = {own_file(self._name, self._rank): self._copied.own}
        if self._rank == 0:
            files[shared_file(self._name)] = self._copied.shared
        entries = []
        for file, tensors in files.items():
            path = self._context.workdir / f"writing-{file}"
            try:
                save_file(tensors, path)
                entries.append(self._context.checkpoints.add(name, file, path))
            finally:
                path.unlink(missing_ok=True)
            layout = layout_json(layout_of(tensors, self._copied.layout))
            entries.append(self._context.checkpoints.add(name, _layout_file(file), layout))
        return entries

    @host_memory_only
    def fetch_state(self, checkpoint: Checkpoint) -> str:
        """Download this rank's part of `checkpoint` without loading it. Returns its damage, or an empty string."""
        folder = self._context.workdir / f"restoring-{own_file(self._name, self._rank)}"
        folder.mkdir()
        try:
            self._fetched = self._fetch(checkpoint, folder)
        except IntegrityError as error:
            return str(error)
        finally:
            shutil.rmtree(folder)  # loaded tensors keep the files that they are in
        return ""

    def _fetch(self, checkpoint: Checkpoint, folder: Path) -> RankState:
        def fetch(file: str) -> Path:
            path = folder / file
            if not path.exists():
                self._context.checkpoints.fetch(checkpoint, file, path)
            return path

        live, all_files = self._state(), {entry.path for entry in checkpoint.files}
        own, common = own_file(self._name, self._rank), shared_file(self._name)
        of_ranks = [*takewhile(all_files.__contains__, (own_file(self._name, rank) for rank in count()))]
        if len(of_ranks) == current_mesh().size:
            saved = self._layouts(checkpoint, [common, own])
            if not saved or same_weights({**saved[common], **saved[own]}, live.layout):
                return RankState(load_file(fetch(common)), load_file(fetch(own)))
        saved = self._layouts(checkpoint, [common, *of_ranks])
        if not saved:
            raise StageError(
                f"the newest checkpoint, of step {checkpoint.step}, is of {len(of_ranks)} workers and of an earlier "
                f"version, which only as many can resume: set placement.workers to {len(of_ranks)}, or "
                "checkpoint.resume to false to start from scratch"
            )
        tensors = redivided({**live.shared, **live.own}, live.layout, saved, fetch)
        shared = without_layout(fetch(common), saved[common])
        if self._rank < len(of_ranks):
            return RankState(shared, {**without_layout(fetch(own), saved[own]), **tensors})
        others = without_layout(fetch(of_ranks[0]), saved[of_ranks[0]])
        # A new rank draws the random numbers that it was seeded for.
        others = {name: tensor for name, tensor in others.items() if not name.startswith("random.")}
        return RankState(shared, {**others, **tensors})

    def _layouts(self, checkpoint: Checkpoint, files: Sequence[str]) -> dict[str, Layout]:
        """Return the layout of each of `files`; none if the checkpoint is of an earlier version."""
        if _layout_file(shared_file(self._name)) not in {entry.path for entry in checkpoint.files}:
            return {}
        return {file: read_layout(self._context.checkpoints.read(checkpoint, _layout_file(file))) for file in files}

    def _state(self) -> RankState:
        """Return the state of all parts, each name below that of its part."""
        joined = RankState()
        for part, stateful in self.parts().items():
            state = stateful.state()
            joined.shared.update({f"{part}.{name}": tensor for name, tensor in state.shared.items()})
            joined.own.update({f"{part}.{name}": tensor for name, tensor in state.own.items()})
            joined.layout.update({f"{part}.{name}": pieces for name, pieces in state.layout.items()})
        return joined

    def restore_state(self) -> None:
        """Load the state downloaded by `fetch_state`. Raises StageError if it does not fit this run."""
        fetched, self._fetched = self._fetched, RankState()
        for part, stateful in self.parts().items():
            stateful.load_state(RankState(_below(part, fetched.shared), _below(part, fetched.own)))
        if random := _below("random", fetched.own):
            load_random_state(random)


def own_file(name: str, rank: int) -> str:
    """Return the file of a rank's own state. name: of its group."""
    return f"{name and f'{name}.'}rank{rank}{_TENSORS}"


def shared_file(name: str) -> str:
    """Return the file of the state that is equal on all ranks, written by rank 0. name: of their group."""
    return f"{name and f'{name}.'}{SHARED}"


def _layout_file(file: str) -> str:
    return f"{file.removesuffix(_TENSORS)}.layout.json"


def _below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(f"{part}."): tensor for n, tensor in tensors.items() if n.startswith(f"{part}.")}
