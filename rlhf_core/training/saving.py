"""The trained model on its way from the ranks to a folder of rank 0, and from there to the job, which publishes it."""

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


def write_model(
    engine: TrainingEngine, folder: Path, tokenizer_folder: Path | None, kept: KeptWeights | None = None
) -> None:
    """Write the model of `engine`, with LoRA its adapter, as a folder on rank 0's node, one tensor in memory at a time.

    With its weights as they are, or those that were `kept`. Every rank must call it.
    Raises StageError if nothing was kept: no validation was finite.
    """
    model = engine.module.model
    assert isinstance(model, nn.Module)
    weights = engine.weights() if kept is None else kept.tensors.items()
    if dist.get_rank() != 0:
        for _ in weights:
            pass
        return
    if kept is not None and not kept.tensors:
        raise StageError("no weights were kept: no validation of this run was finite")
    save_model(model, engine.weight_layout() if kept is None else kept.tensors, weights, folder, tokenizer_folder)
