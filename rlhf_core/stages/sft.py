"""SFT: a model and conversations in; a policy (full weights, or an adapter) out."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages import SFTConfig
from rlhf_core.data.chat import load_tokenizer
from rlhf_core.data.reading import read_rows
from rlhf_core.stages.contract import Input, Output, StageContext
from rlhf_core.stages.workers import GroupFactory, ray_workers, reserved_devices, running, save
from rlhf_core.trainers.sft import LanguageModelWorker, conversation_examples, pack_sequences
from rlhf_core.trainers.supervised import count_steps, require_fit, train


def run(
    config: SFTConfig, inputs: Mapping[str, Input], context: StageContext, group: GroupFactory = ray_workers
) -> Output:
    model = inputs["model"]
    examples = conversation_examples(load_tokenizer(model.folder), read_rows(inputs["dataset"].folder))
    require_fit(examples, model.folder, config.max_length)

    folder = context.workdir / "policy"
    steps = count_steps(len(examples), config)
    context.progress(0, steps, "start workers")
    with running(group(config.placement, LanguageModelWorker, config, context, model.manifest.ref, steps)) as workers:
        metrics = train(config, examples, pack_sequences, workers, context)
        save(workers, folder)

    return Output(
        kind=Kind.POLICY if config.lora is None else Kind.ADAPTER,
        folder=folder,
        metrics={**metrics, "steps": steps},
        devices=reserved_devices(config.placement),
    )
