"""Merge: a model and an adapter trained on it in; one policy with full weights out."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.merging import MergeConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.models.merging import merge_adapter


def run(config: MergeConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Merge in the job's own process, which needs no optimizer and no second rank."""
    folder = context.workdir / "policy"
    context.progress(0, 1, "merge")
    merge_adapter(inputs["model"].folder, inputs["adapter"].folder, folder)
    context.progress(1, 1, "merge")
    return Output(kind=Kind.POLICY, folder=folder)
