"""Saving of the trained model: from the ranks to a folder of rank 0's node, and from there to the job's node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from rlhf_core.contract import StageContext
from rlhf_core.errors import StageError
from rlhf_core.models.loading import save_model
from rlhf_core.training.best import KeptWeights
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.group import WorkerGroup
from rlhf_core.training.snapshots import SnapshotWorker

W = TypeVar("W", bound=SnapshotWorker)


def save(
    workers: WorkerGroup[W], folder: Path, context: StageContext, write: Callable[[W, Path], None] | None = None
) -> None:
    """Save the trained model to `folder`, in this job's working folder. write: see SnapshotWorker.hand_over.

    From another node, the files are transferred through the store: rank 0 uploads them as blobs, this node downloads
    them. The download streams to disk; publishing does not repeat the upload, since the blobs exist. If the folder
    itself is not published, such as an adapter that is merged first, its blobs stay unreferenced.
    """
    files = workers.call(SnapshotWorker.hand_over, folder, write)[0]
    if files:
        print(f"rank 0 is on another node: its {len(files)} files come through the store", flush=True)
        context.get_files(files, folder)
    if not folder.is_dir():
        raise StageError(f"rank 0 found the job's working folder, but {folder} is not on the job's node")


def write_model(
    engine: TrainingEngine, folder: Path, tokenizer_folder: Path | None, kept: KeptWeights | None = None
) -> None:
    """Write the model of `engine`, with LoRA its adapter, to a folder on rank 0's node, one tensor in memory at a time.

    kept: weights to write instead of the current ones. Every rank must call it.
    Raises StageError if none were kept: no validation was finite.
    """
    model = engine.module.model
    assert isinstance(model, nn.Module)
    weights = engine.weights() if kept is None else kept.weights()
    if dist.get_rank() != 0:
        for _ in weights:
            pass
        return
    save_model(model, engine.weight_layout() if kept is None else kept.layout, weights, folder, tokenizer_folder)
