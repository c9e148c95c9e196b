"""What pre-training and SFT share: sequences in, the trained model's folder out."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages import PretrainConfig, SFTConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.workers import save
from rlhf_core.supervised.loop import count_steps, train
from rlhf_core.supervised.sft import LanguageModelWorker, pack_sequences
from rlhf_core.supervised.validation import Read, Validation, read_held_out, row_counts


def train_language_model(
    config: PretrainConfig | SFTConfig,
    inputs: Mapping[str, Input],
    read: Read,
    context: StageContext,
    cluster: Cluster,
    kind: Kind,
) -> Output:
    """Train the input `model` on what `read` finds in the input `dataset`."""
    model = inputs["model"]
    fitted, held_out = read(inputs["dataset"]), read_held_out(config, inputs, read)
    folder = context.workdir / "model"
    steps = count_steps(len(fitted.rows), config)
    context.progress(0, steps, "start workers")
    ranks = cluster.workers(config.placement, LanguageModelWorker, config, context, model.manifest.ref, steps)
    with ranks as workers:
        validation = Validation(config, held_out, pack_sequences, workers, context) if held_out else None
        metrics = train(config, fitted.rows, pack_sequences, workers, context, validation)
        save(workers, folder, context)
    return Output(kind, folder, {**metrics, "steps": steps, **fitted.metrics(), **row_counts(held_out)})
