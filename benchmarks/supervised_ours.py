"""Our side of `benchmarks.dpo_vs_trl` and `benchmarks.sft_vs_trl`: the stages as shipped.

`python -m benchmarks.supervised_ours WORKLOAD MODEL RESULT SIDE`. One training rank (DeepSpeed) is a Ray actor in its
own process, and the loop is in this one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.stage_alone import stage_inputs
from benchmarks.supervised_workload import LEARNING_RATES, SupervisedWorkload, reply, result, rows
from benchmarks.workload import COMPILED, SELECTIVE, Result, answer
from rlhf_core.actors.worker_group import RayWorkerGroup
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.stages.preference import PreferenceConfig
from rlhf_core.data.reading import write_dataset
from rlhf_core.stages import preference, sft
from rlhf_core.stages.key import computing_libraries
from rlhf_core.stages.ray_cluster import RayCluster
from rlhf_core.supervised.examples import Shard
from rlhf_core.supervised.worker import SupervisedWorker

W = TypeVar("W")
DATASET = "rows"


class CountingCluster(RayCluster):
    """Counts the examples and tokens sent to the one rank."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    @contextmanager
    def workers(
        self, placement: Placement, engine: EngineConfig, factory: Callable[..., W], /, *args: Any
    ) -> Iterator[RayWorkerGroup[W]]:
        with super().workers(placement, engine, factory, *args) as group:
            scatter = group.scatter

            def counted(method: Callable[..., Any], shards: Sequence[Any], /, *more: Any, **named: Any) -> list[Any]:
                if method is SupervisedWorker.train:
                    self.steps += map(_counts, *shards)
                return scatter(method, shards, *more, **named)

            group.scatter = counted  # type: ignore[method-assign]
            yield group


def _counts(shard: Shard) -> dict[str, int]:
    tokens = sum(batch.num_tokens for batch in shard.micro_batches)
    return {"examples": shard.num_examples, "tokens": tokens, "trained": shard.num_tokens}


def config(workload: SupervisedWorkload, side: str) -> PreferenceConfig | SFTConfig:
    """Return the stage's settings; all others are defaults."""
    shared = {
        "dataset": DATASET,
        "max_length": workload.max_length,
        "batch_size": workload.batch,
        "placement": {"threads": workload.threads},
        "engine": {
            "dtype": workload.dtype,
            "zero_stage": 0,
            "compiled": side == COMPILED,
            "gradient_checkpointing": "selective" if side == SELECTIVE else False,
            "tokens_per_micro_batch": workload.tokens_per_micro_batch,
        },
        "checkpoint": {"every_minutes": None},
        "log_every": 1,
        "optimizer": {
            "learning_rate": LEARNING_RATES[workload.method], "schedule": "constant", "warmup_share": 0.0
        },
    }  # fmt: skip
    if workload.method == "sft":
        return SFTConfig.model_validate(shared)
    return PreferenceConfig.model_validate({**shared, "losses": {"dpo": {"type": "dpo", "beta": 0.1}}})


def dataset(workload: SupervisedWorkload) -> list[dict[str, Any]]:
    """Return rows of format `preferences` or `conversations`."""
    all_rows = rows(workload)
    if workload.method == "dpo":
        return all_rows
    return [{"id": row["id"], "messages": [*row["prompt"], reply(row["completion"])]} for row in all_rows]


def run(workload: SupervisedWorkload, model: Path, side: str) -> Result:
    cluster = CountingCluster()
    with tempfile.TemporaryDirectory(prefix=f"{workload.method}-") as name:
        folder = Path(name)
        write_dataset(folder / DATASET, dataset(workload), {})
        inputs, context = stage_inputs(model, folder / DATASET, folder)
        settings = config(workload, side)
        if isinstance(settings, SFTConfig):
            sft.run(settings, inputs, context, cluster)
        else:
            preference.run(settings, inputs, context, cluster)
    ended = [(time, metrics["loss"]) for time, metrics in context.ended]
    return result(workload, ended, cluster.steps, computing_libraries())


if __name__ == "__main__":
    answer(sys.argv[1:], SupervisedWorkload, run)
