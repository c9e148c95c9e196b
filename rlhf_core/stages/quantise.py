"""Quantise: a model in; the same with the values that its layers have in 4 bits out, a base for adapters."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.quantisation import QuantiseConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.models.folders.folder import stored_dtype
from rlhf_core.models.quantisation import write_rounded


def run(config: QuantiseConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Round in the job's own process. Raises StageError for a model that cannot be quantised."""
    folder, model = context.workdir / "model", inputs["model"].folder
    context.progress(0, 1, "quantise")
    write_rounded(model, folder, config.dtype or stored_dtype(model))
    context.progress(1, 1, "quantise")
    return Output(kind=Kind.POLICY, folder=folder)
