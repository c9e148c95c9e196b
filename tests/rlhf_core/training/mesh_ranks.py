"""What tests/rlhf_core/training/test_mesh.py asks of each rank of a mesh. The folder holds the model `dense`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.artifacts.checkpoints import Checkpoint, CheckpointFile
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.contract import Input
from rlhf_core.division import Division
from rlhf_core.mesh import Mesh, current_mesh
from rlhf_core.metrics import LossAndMetrics, Max, Sum, TokenMean
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.sft import LanguageModelWorker
from rlhf_core.training.distributed import join_group
from rlhf_core.training.metrics import over_steps
from rlhf_core.training.randomness import seed_rank
from rlhf_core.types import PackedBatch
from tests.rlhf_core.stages.context import LocalContext, local_input
from tests.rlhf_core.training.ranks import Answer, write_answers
from tests.rlhf_core.training.tiny_engine import (
    GRADIENT,
    MUON,
    SEQUENCES,
    TOKENS,
    batch,
    build,
    gradient,
    loss,
    weights_of,
)


def share(mesh: Mesh) -> list[PackedBatch]:
    return Division.of(batch(), replicas=mesh.data, tokens_per_micro_batch=6).split()[mesh.replica]


def reductions(folder: Path) -> Iterator[Answer]:
    """The mesh itself, and all that is added up over ranks."""
    mesh = current_mesh()
    places = {axis: dist.get_group_rank(group, mesh.rank) for axis, group in mesh.groups.items()}
    yield "mesh", {"replica": mesh.replica, "data": mesh.data, "size": mesh.size, "places": places}, {}
    seed_rank(3)
    yield "random numbers", {"drawn": float(torch.rand(()))}, {}

    def reporting(model: nn.Module, part: PackedBatch) -> LossAndMetrics:
        value, _ = loss(model, part)
        return value, {
            "sequences": Sum(torch.tensor(part.num_sequences)),
            "replica": Max(torch.tensor(mesh.replica - 5.0)),
            "lucky": TokenMean((part.input_ids == 5).sum()),
        }

    engine = build(folder / "dense", optimizer=GRADIENT, zero_stage=0)
    tokens = engine.total(share(mesh), lambda model, part: part.loss_mask.sum(0, keepdim=True))
    measured = engine.measure(share(mesh), lambda model, part: loss(model, part)[1])
    stepped = over_steps([engine.step(share(mesh), reporting)])
    yield "reductions", {"tokens": int(tokens), "measured": measured, "stepped": stepped}, gradient(engine)


def steps(folder: Path) -> Iterator[Answer]:
    mesh = current_mesh()
    for name, settings in STEPS.items():
        engine = build(folder / "dense", **settings)
        norms = [engine.step(share(mesh), loss).gradient_norm for _ in range(3)]
        yield f"steps {name}", {"norms": norms}, weights_of(engine)


STEPS: dict[str, dict[str, Any]] = {
    "adamw 0": {"zero_stage": 0}, "adamw 3": {"zero_stage": 3}, "muon 2": {"zero_stage": 2, "optimizer": MUON},
}  # fmt: skip


def resuming(folder: Path, work: Path) -> Iterator[Answer]:
    """Two steps with dropout. The second is repeated by a worker restored from what all ranks have written."""
    model = local_input(folder / "dense", Kind.POLICY)
    context = LocalContext(work, given_seed=3, artifacts={model.manifest.ref.path: model})
    shard = Shard(share(current_mesh()), TOKENS, len(SEQUENCES))
    config = SFTConfig.model_validate({
        "dataset": "d", "batch_size": 4, "max_length": 8, "optimizer": {"learning_rate": 0.01},
        "lora": {"rank": 2, "dropout": 0.5}, "engine": {"dtype": "float32", "zero_stage": 2},
    })  # fmt: skip
    restored, found = repeated_step(config, context, model, shard)
    with torch.no_grad():
        dropped = restored.engine.module.train()(batch())[0]
    yield "resuming", {**found, "dropped": dropped.tolist()}, {}


def repeated_step(
    config: SFTConfig, context: LocalContext, model: Input, shard: Shard
) -> tuple[LanguageModelWorker, dict[str, Any]]:
    """The second of two steps, repeated by a worker restored from what all ranks have written; that worker, and how
    both steps compare.
    """
    kept, restored = (LanguageModelWorker(config, context, model.manifest.ref, 3) for _ in range(2))
    kept.train([shard])
    kept.copy_state()
    name = f"{1:012d}-{0:012x}"
    files = everywhere(kept.write_state(name))
    expected = kept.train([shard])
    checkpoint = Checkpoint(
        name=name, step=1, ranks=dist.get_world_size(), files=files, libraries={}, created_at=datetime.now(UTC)
    )
    damage = restored.fetch_state(checkpoint)
    restored.restore_state()
    again = restored.train([shard])
    return restored, {
        "files": sorted(file.path for file in files), "damage": damage, "norm": expected[0].gradient_norm,
        "equal": again == expected and equal(weights_of(kept.engine), weights_of(restored.engine)),
    }  # fmt: skip


def everywhere(files: list[CheckpointFile]) -> tuple[CheckpointFile, ...]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, files)
    return tuple(chain.from_iterable(gathered))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def main(rank: int, address: str, folder: Path, *sizes: str) -> None:
    """sizes: ranks, and of the mesh the sequence and the tensor axis."""
    torch.set_num_threads(1)
    size, sequence, tensor = map(int, sizes)
    join_group(rank=rank, size=size, address=address, sequence=sequence, tensor=tensor)
    scenarios = (reductions(folder), steps(folder), resuming(folder, folder / "work"))
    write_answers(rank, folder, chain.from_iterable(scenarios))
