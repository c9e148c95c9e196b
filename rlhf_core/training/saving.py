"""The trained model on its way from rank 0 to the job, which publishes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlhf_core.contract import StageContext
from rlhf_core.errors import StageError
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.snapshots import SnapshotWorker

W = TypeVar("W", bound=SnapshotWorker)


def save(
    workers: WorkerGroup[W], folder: Path, context: StageContext, write: Callable[[W, Path], None] | None = None
) -> None:
    """Rank 0 writes the trained model, and `folder`, in this job's working folder, then has it on this node.

    From another node it travels through the store: rank 0 uploads the files as blobs, this node downloads them. That
    costs one download of the model, to disk and never whole in memory; the upload is the one that publishing would do,
    which finds the blobs there. A folder that is not published itself, such as an adapter that is merged first, leaves
    its blobs unreferenced.
    """
    files = workers.call(SnapshotWorker.hand_over, folder, write)[0]
    if files:
        print(f"rank 0 is on another node: its {len(files)} files come through the store", flush=True)
        context.get_files(files, folder)
    if not folder.is_dir():
        raise StageError(f"rank 0 found the job's working folder, but {folder} is not on the job's node")
