"""Reward regression: a model and completions with rewards in; a reward model that predicts them out."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.config.stages.reward_models import RewardRegressionConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.scalar_model import train_scalar_model
from rlhf_core.supervised.targets import RewardRegressionWorker, pack_targets, rewarded_completions


def run(config: RewardRegressionConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    return train_scalar_model(
        config, inputs, context, cluster,
        encode=rewarded_completions, pack=pack_targets, worker=RewardRegressionWorker, counted="completions",
    )  # fmt: skip
