"""What pre-training and SFT share: sequences in, the trained model's folder out."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages import PretrainConfig, SFTConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.stages.workers import GroupFactory, running, save
from rlhf_core.supervised.loop import Example, count_steps, require_fit, train
from rlhf_core.supervised.sft import LanguageModelWorker, pack_sequences


def train_language_model(
    config: PretrainConfig | SFTConfig,
    model: Input,
    examples: Sequence[Example],
    context: StageContext,
    group: GroupFactory,
    kind: Kind,
) -> Output:
    """Train `model` on the examples, as `config` says. Raises StageError if one is too long or there is none."""
    require_fit(examples, model.folder, config.max_length)
    folder = context.workdir / "model"
    steps = count_steps(len(examples), config)
    context.progress(0, steps, "start workers")
    with running(group(config.placement, LanguageModelWorker, config, context, model.manifest.ref, steps)) as workers:
        metrics = train(config, examples, pack_sequences, workers, context)
        save(workers, folder, context)
    return Output(kind, folder, metrics={**metrics, "steps": steps})
