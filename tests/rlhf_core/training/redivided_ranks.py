"""What tests/rlhf_core/training/test_redivision.py asks of each rank: resume, take steps, write a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_core.artifacts.checkpoints import Checkpoint, CheckpointFile
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.division import Division
from rlhf_core.mesh import current_mesh
from rlhf_core.rl.weights import WeightAverage
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.training.best import KeptWeights
from rlhf_core.training.distributed import join_group
from rlhf_core.training.snapshots import SnapshotWorker
from rlhf_core.training.state import Stateful
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.training.ranks import Answer, write_answers
from tests.rlhf_core.training.tiny_engine import MUON, OPTIMIZER, batch, build, loss

# By name: ZeRO stage before and after, dtype, the optimizer's name, and whether an adapter is trained.
CASES = {
    "stage 0": (0, 0, "float32", "adamw", False),
    "stage 2": (2, 2, "bfloat16", "adamw", False),
    "stage 3": (3, 3, "float32", "muon", False),
    "stage 2, muon": (2, 2, "float32", "muon", False),
    "stage 3, adapter": (3, 3, "bfloat16", "adamw", True),
    "from stage 0 to 3": (0, 3, "float32", "adamw", False),
    "from stage 3 to 2": (3, 2, "bfloat16", "adamw", False),
    "from stage 2 to 0": (2, 0, "float32", "adamw", False),
}


class Worker(SnapshotWorker):
    def __init__(self, folder: Path, case: str, *, after: bool) -> None:
        super().__init__(LocalContext(folder / case))
        before_stage, after_stage, dtype, optimizer, lora = CASES[case]
        torch.manual_seed(0)
        self.engine = build(
            folder / "dense", optimizer=MUON if optimizer == "muon" else OPTIMIZER,
            lora=LoraConfig(rank=2, alpha=4.0) if lora else None,
            zero_stage=after_stage if after else before_stage, dtype=dtype,
        )  # fmt: skip
        self.kept = KeptWeights(self.engine.weight_layout())
        self.average = WeightAverage(self.engine, 0.5)

    def parts(self) -> Mapping[str, Stateful]:
        return {"policy": self.engine, "kept": self.kept, "average": self.average}

    def save(self, folder: Path) -> None: ...

    def steps(self, count: int) -> list[float]:
        mesh = current_mesh()
        share = Division.of(batch(), replicas=mesh.data, tokens_per_micro_batch=6).split()[mesh.replica]
        return [self.engine.step(share, loss).means["loss"] for _ in range(count)]

    def checkpoint(self, step: int) -> None:
        """Write all of it, as the driver of `checkpointing` does."""
        self.copy_state()
        mesh, written = current_mesh(), [None] * dist.get_world_size()
        name = self._context.checkpoints.new_name(step)[:13] + "0" * 12
        dist.all_gather_object(written, [entry.model_dump_json() for entry in self.write_state(name)])
        entries = [CheckpointFile.model_validate_json(entry) for of_rank in written for entry in of_rank or ()]
        if mesh.rank == 0:
            self._context.checkpoints.commit(
                Checkpoint(
                    name=name, step=step, ranks=mesh.size, replicas=mesh.data, files=tuple(entries), libraries={},
                    created_at=datetime.now(UTC),
                )
            )  # fmt: skip
        dist.barrier()

    def resume(self) -> None:
        newest = next(self._context.checkpoints.newest())
        assert isinstance(newest, Checkpoint)
        assert self.fetch_state(newest) == ""
        self.restore_state()


def _answers(folder: Path, cases: list[str], action: str) -> Iterator[Answer]:
    """`begin`: two steps. `continue`, perhaps on other ranks and at another stage: two more. `return`: to the first."""
    for case in cases:
        worker = Worker(folder, case, after=action == "continue")
        if action == "begin":
            worker.steps(2)
            worker.kept.keep(worker.engine.weights())
            worker.average.update()
            worker.checkpoint(2)
        else:
            torch.manual_seed(123 + current_mesh().rank)
            worker.resume()
            worker.checkpoint({"continue": 3, "return": 4}[action])
        weights = {name: tensor.cpu().clone() for name, tensor in worker.engine.master_weights()}
        with worker.average.in_place():
            average = {name: tensor_digest(tensor) for name, tensor in worker.engine.weights()}
        kept = {name: tensor_digest(tensor) for name, tensor in worker.kept.weights()}
        found = {"random": torch.initial_seed(), "kept": kept, "average": average}
        yield case, found, weights
        yield f"{case}, later", {"losses": [] if action == "return" else worker.steps(2)}, {}


def main(rank: int, address: str, folder: Path, size: str, tensor: str, action: str, cases: str) -> None:
    torch.set_num_threads(1)
    join_group(rank=rank, size=int(size), address=address, tensor=int(tensor))
    write_answers(rank, folder, _answers(folder.parent, json.loads(cases), action))
