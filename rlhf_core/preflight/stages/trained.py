"""Checks shared by all stages that train a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.base_model import FolderModel, ScratchModel
from rlhf_core.config.stages.trained import LoraConfig
from rlhf_core.graph.drafting import Draft
from rlhf_core.models.folders.attention_names import attention_problem
from rlhf_core.models.folders.folder import depends_on_longest, has_experts
from rlhf_core.models.folders.headers import stored_tensors
from rlhf_core.models.folders.scratch import linear_layers
from rlhf_core.models.folders.targets import saved_problem, target_problem
from rlhf_core.models.folders.tensor_plan import plan_problem, sizes_problem
from rlhf_core.models.folders.vision_models import reads_images
from rlhf_core.preflight.model import BaseModel
from rlhf_core.preflight.stages.context import CheckContext, Note


def engine_problems(engine: EngineConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    """Yield the reasons why the node's model cannot be trained with `engine`."""
    model = context.models.get(node.name)
    if model is None:
        return
    if (inspection := model.inspection) is not None:
        unfit = attention_problem(inspection.model_class, inspection.attentions, engine.attention)
        yield from () if unfit is None else (f"{node.section}.engine.attention: {unfit}",)
    if engine.attention == "flex" and reads_images(model.settings):
        yield f"{node.section}.engine.attention: flex was not tested with models that read images: set sdpa"
    if engine.freeze_vision and not reads_images(model.settings):
        yield f"{node.section}.engine.freeze_vision: this model reads text alone: remove it"
    if engine.tensor_parallel > 1 and (reason := _keeps_weights_whole(engine, model)) is not None:
        yield f"{node.section}.engine.tensor_parallel: {reason}"
    if engine.sequence_parallel > 1 and (reason := _keeps_tokens_together(model.settings)) is not None:
        yield f"{node.section}.engine.sequence_parallel: {reason}, so workers cannot share its tokens: remove it"


def _keeps_weights_whole(engine: EngineConfig, model: BaseModel) -> str | None:
    if reads_images(model.settings):
        return "this model reads images, which was not tested with weights that workers share: remove it"
    inspection = model.inspection
    problem = None if inspection is None else plan_problem(inspection.model_class, inspection.plan)
    return problem or sizes_problem(model.settings, engine.tensor_parallel)


def _keeps_tokens_together(settings: Mapping[str, Any]) -> str | None:
    if reads_images(settings):
        return "this model reads images"
    return (
        "the factors of this model's positions depend on the longest sequence" if depends_on_longest(settings) else None
    )


def adapter_problems(
    lora: LoraConfig | None, setting: str, start: str, node: Draft, context: CheckContext
) -> Iterator[str]:
    """Yield the reasons why the model at the input `start` cannot have the adapter of `setting`."""
    model = context.models.get(node.inputs[start])
    if lora is None or model is None:
        return
    modules: set[str] | None = None
    match model.config.source:
        case ScratchModel() as source:
            layers = list(linear_layers(source))
        case FolderModel(path=path) if not has_experts(model.settings):
            stored = stored_tensors(context.root / path)
            layers = [
                name.removesuffix(".weight")
                for name, tensor in stored.items()
                if name.endswith(".weight") and len(tensor.shape) == 2
            ]
            modules = {name.rpartition(".")[0] for name in stored}
        case _:
            return  # in memory experts are other layers than in the folder
    tied = bool(model.settings.get("tie_word_embeddings"))
    for problem in (target_problem(lora, layers, tied=tied), saved_problem(lora, modules, tied=tied)):
        if problem is not None:
            yield f"{node.section}.{setting}: {problem}"


def few_rows(dataset: str, setting: str, needed: int, then: str, node: Draft, context: CheckContext) -> Iterator[Note]:
    """Yield a note for a dataset with fewer rows than a step takes."""
    num_rows = context.rows.get(dataset, needed)
    if num_rows < needed:
        yield Note(f"{node.section}: `{dataset}` has {num_rows} rows, fewer than {setting}={needed}: {then}")
