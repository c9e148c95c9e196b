"""What pre-training and SFT share: sequences in, the trained model's folder out."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.data import LongRowPolicy
from rlhf_core.config.stages import PretrainConfig, SFTConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.workers import save
from rlhf_core.supervised.loop import Example, count_steps, require_fit, train
from rlhf_core.supervised.sft import LanguageModelWorker, pack_sequences


def train_language_model(
    config: PretrainConfig | SFTConfig,
    model: Input,
    examples: Sequence[Example],
    context: StageContext,
    cluster: Cluster,
    kind: Kind,
    on_long_row: LongRowPolicy = "error",
) -> Output:
    """Train `model` on the examples that fit. Raises StageError if there is none, and as `on_long_row` says."""
    fitted = require_fit(examples, model.folder, config.max_length, on_long_row)
    folder = context.workdir / "model"
    steps = count_steps(len(fitted.rows), config)
    context.progress(0, steps, "start workers")
    ranks = cluster.workers(config.placement, LanguageModelWorker, config, context, model.manifest.ref, steps)
    with ranks as workers:
        metrics = train(config, fitted.rows, pack_sequences, workers, context)
        save(workers, folder, context)
    return Output(kind, folder, metrics={**metrics, "steps": steps, **fitted.metrics()})
