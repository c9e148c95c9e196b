"""Runs in processes of their own that a test kills with SIGKILL at a moment that it chose, and then runs again.

The process is a fork of one that has imported everything, so that one more attempt costs little. At the chosen
moment it says so by a file, and waits to be killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save_file

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.contract import Input
from rlhf_core.stages.in_process import InProcessCluster, OpenEngine, engine_beside
from rlhf_core.training.group import InlineGroup
from tests.forked_children import FORKS
from tests.rlhf_core.stages.context import LocalContext, wait_for_checkpoint

SECONDS = 480.0


def hold(folder: Path) -> None:
    """In the run: the chosen moment is here. Returns if it was here before: then this run goes on to its end."""
    try:
        (folder / "held").touch(exist_ok=False)
    except FileExistsError:
        return
    time.sleep(SECONDS)
    os._exit(3)  # nobody came


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """A run in a process of its own."""
    process = FORKS.Process(target=function, args=args)
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    """Let it run to its end."""
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0


def kill_when_held(process: BaseProcess, folder: Path) -> None:
    """Kill it when it holds in `folder`."""
    deadline = time.monotonic() + SECONDS
    while not (folder / "held").exists():
        assert process.is_alive(), f"ended with {process.exitcode} before the chosen moment"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join(SECONDS)
    assert process.exitcode == -9


class KeptCluster(InProcessCluster):
    """Leaves the worker's whole state in `folder` when its stage ends."""

    def __init__(self, folder: Path, open_engine: OpenEngine = engine_beside) -> None:
        super().__init__(open_engine)
        self._folder = folder

    @contextmanager
    def workers(
        self, placement: Placement, engine: EngineConfig, factory: Callable[..., Any], /, *args: Any
    ) -> Iterator[InlineGroup[Any]]:
        with super().workers(placement, engine, factory, *args) as group:
            yield group
            group._worker.copy_state()
            copied = group._worker._copied
            for name, tensors in (("shared", copied.shared), ("own", copied.own)):
                save_file(tensors, self._folder / f"{name}.safetensors")


class HeldStore(LocalStore):
    """Holds when a file whose name contains `name` is uploaded the `count`th time: before it, or when it is there."""

    def __init__(self, folder: Path, name: str, count: int, *, after: bool, marks: Path) -> None:
        super().__init__(folder)
        self._arguments = (folder, name, count)
        self._name, self._left, self._after, self._marks = name, count, after, marks

    def __reduce__(self) -> Any:  # into ranks, which count their own uploads
        return partial(HeldStore, after=self._after, marks=self._marks), self._arguments

    def put_file_if_absent(self, path: str, local_path: Path) -> bool:
        return bool(self._held(path, lambda: super(HeldStore, self).put_file_if_absent(path, local_path)))

    def put_if_absent(self, path: str, data: bytes) -> None:
        self._held(path, lambda: super(HeldStore, self).put_if_absent(path, data))

    def _held(self, path: str, write: Callable[[], Any]) -> Any:
        self._left -= self._name in path
        here = self._left == 0 and self._name in path
        if here and not self._after:
            hold(self._marks)
        written = write()
        if here and self._after:
            hold(self._marks)
        return written


class HeldContext(LocalContext):
    """With a store of its own in `folder`, in which `moment` may hold the second checkpoint."""

    REF: ClassVar = ArtifactRef(stage="test", key="0" * 64)
    MOMENTS: ClassVar = {
        "rank 1 uploads": ("rank1.safetensors", False),
        "before the manifest": ("manifest.json", False),
        "after the manifest": ("manifest.json", True),
    }

    def __init__(self, folder: Path, inputs: Mapping[str, Input], moment: str) -> None:
        artifacts = {item.manifest.ref.path: item for item in inputs.values()}
        super().__init__(folder / "work", user_files_root=folder, artifacts=artifacts)
        name, after = self.MOMENTS.get(moment, ("nothing", False))
        self._store = HeldStore(folder / "store", name, 2, after=after, marks=folder)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self._store, self.REF)

    def progress(self, step: int, total: int, phase: str = "", **figures: float) -> None:
        wait_for_checkpoint()
        super().progress(step, total, phase, **figures)
