"""Distillation: a student, conversations and a teacher in; a policy (full weights, or an adapter) out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from transformers import AutoConfig

from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.config.stages.distillation import TEACHER_INPUT, DistillationConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.data.fitting import Fitted
from rlhf_core.errors import StageError
from rlhf_core.models.folders.readers import same_tokens, teacher_problem, vocabulary_problem
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.language_model import train_language_model
from rlhf_core.supervised.distillation import DistillationWorker
from rlhf_core.supervised.encoding import read_examples
from rlhf_core.supervised.sft import conversation_examples, pack_sequences
from rlhf_core.supervised.stored_examples import StoredExamples
from rlhf_core.supervised.stored_top_logprobs import StoredTop


def run(config: DistillationConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    """Train the student.

    Raises StageError if it cannot learn from the teacher, or stored log-probs do not cover all rows.
    """
    folder = inputs["model"].folder
    encode = partial(conversation_examples, load_tokenizer(folder))
    stored = _stored(config, inputs)
    teacher = _teacher(config, inputs) if stored is None else None

    def read(dataset: Input) -> Fitted[StoredExamples]:
        fitted = read_examples(dataset, encode, config, folder, context)
        if stored is not None:
            stored.require(fitted.rows)
        return fitted

    temperature = config.temperature if stored is None else stored.settings.temperature
    return train_language_model(
        config, inputs, read, context, cluster, Kind.POLICY if config.lora is None else Kind.ADAPTER,
        worker=DistillationWorker, arguments=[teacher, temperature],
        pack=pack_sequences if stored is None else stored.pack,
    )  # fmt: skip


def _teacher(config: DistillationConfig, inputs: Mapping[str, Input]) -> ArtifactRef:
    teacher, student = inputs[TEACHER_INPUT], inputs["model"]
    of_both = (AutoConfig.from_pretrained(model.folder).to_dict() for model in (teacher, student))
    reads = same_tokens(teacher.folder, student.folder)
    if problem := teacher_problem(*of_both, max_length=config.max_length, reads_tokens=reads):
        raise StageError(f"{TEACHER_INPUT}: {problem}: name another model")
    return teacher.manifest.ref


def _stored(config: DistillationConfig, inputs: Mapping[str, Input]) -> StoredTop | None:
    if not config.stored_inputs:
        return None
    stored = StoredTop(inputs[name].folder for name in config.stored_inputs)
    student = AutoConfig.from_pretrained(inputs["model"].folder).to_dict()
    if problem := vocabulary_problem({"vocab_size": stored.settings.vocabulary}, student):
        raise StageError(f"teacher.top_logprobs: {problem}: name those of another model")
    return stored
