"""Common part of pre-training, SFT and preference learning: examples in; the trained model's folder out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.trained import SupervisedConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.stages.cluster import Cluster
from rlhf_core.supervised.examples import Packer
from rlhf_core.supervised.loop import train
from rlhf_core.supervised.policy import PolicyWorker
from rlhf_core.supervised.sft import LanguageModelWorker, pack_sequences
from rlhf_core.supervised.validation import Read, Validation, read_held_out, row_counts
from rlhf_core.training.saving import save


def train_language_model(
    config: SupervisedConfig,
    inputs: Mapping[str, Input],
    read: Read,
    context: StageContext,
    cluster: Cluster,
    kind: Kind,
    *,
    worker: type[PolicyWorker[Any]] = LanguageModelWorker,
    arguments: Sequence[Any] = (),
    pack: Packer = pack_sequences,
) -> Output:
    """Train the input `model` on the examples that `read` returns for the input `dataset`.

    worker: one rank, constructed with `arguments`; pack: makes its batches.
    """
    model = inputs["model"]
    fitted, held_out = read(inputs["dataset"]), read_held_out(config, inputs, read)
    folder = context.workdir / "model"
    steps = config.count_steps(len(fitted.rows))
    context.progress(0, steps, "start workers")
    ref = model.manifest.ref
    with cluster.workers(config.placement, config.engine, worker, config, context, ref, steps, *arguments) as workers:
        validation = Validation(config, held_out, pack, workers, context) if held_out else None
        metrics = train(config, fitted.rows, pack, workers, context, validation)
        save(workers, folder, context)
    return Output(kind, folder, {**metrics, "steps": steps, **fitted.metrics(), **row_counts(held_out)})
