"""Merge: a model and an adapter trained on it in; one policy with full weights out."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.merging import MergeConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.models.merging import merge_adapter
from rlhf_core.rl.pass_rates import RATES_FILE


def run(config: MergeConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Merge in the job's own process, which needs no optimizer and no second rank."""
    folder = context.workdir / "policy"
    context.progress(0, 1, "merge")
    adapter = inputs["adapter"].folder
    merge_adapter(inputs["model"].folder, adapter, folder)
    if (adapter / RATES_FILE).is_file():
        shutil.copyfile(adapter / RATES_FILE, folder / RATES_FILE)
    context.progress(1, 1, "merge")
    return Output(kind=Kind.POLICY, folder=folder)
