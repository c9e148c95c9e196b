"""Merge of models: several of one architecture and tokenizer in; one with full weights out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.merging import MergeModelsConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import copy_tokenizer, read_config
from rlhf_core.models.folders.mixable import OTHER_TOKENIZER, mix_problem
from rlhf_core.models.folders.readers import same_tokens
from rlhf_core.models.mixing import linear, mix_models, slerp, ties
from rlhf_core.models.weights import require_fit


def run(config: MergeModelsConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Merge in the job's own process. Raises StageError if the models are incompatible."""
    model = inputs["model"].folder
    others = [inputs[f"others.{place}.model"].folder for place in range(len(config.others))]
    for place, other in enumerate(others):
        if not same_tokens(model, other):
            raise StageError(f"others.{place}.model: {OTHER_TOKENIZER}")
        if problem := mix_problem(read_config(model), read_config(other)):
            raise StageError(f"others.{place}.model: {problem}")
    weights = [other.weight for other in config.others]

    def mix(first: Tensor, rest: Sequence[Tensor]) -> Tensor:
        match config.method:
            case "linear":
                return linear(first, rest, weights)
            case "slerp":
                return slerp(first, rest[0], weights[0])
            case "ties":
                return ties(first, rest, weights, density=config.density, scale=config.scale)

    folder = context.workdir / "model"
    folder.mkdir()
    context.progress(0, 1, "merge")
    mix_models(model, others, mix, folder)
    copy_tokenizer(model, folder)
    require_fit(folder, "causal")
    context.progress(1, 1, "merge")
    return Output(kind=Kind.POLICY, folder=folder)
