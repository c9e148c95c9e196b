"""Reward model: a model and preference pairs in; a model with one score, and the scale of its rewards out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rlhf_core.config.stages.reward_models import RewardModelConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.models.vision import open_processor
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.scalar_model import train_scalar_model
from rlhf_core.supervised.encoding import one_example, row_images
from rlhf_core.supervised.pairs import pack_pairs
from rlhf_core.supervised.reward_model import RewardModelWorker, judged_pair


def run(config: RewardModelConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster) -> Output:
    processor = open_processor(inputs["model"].folder)
    return train_scalar_model(
        config, inputs, context, cluster,
        encode=partial(one_example, judged_pair), pack=partial(pack_pairs, processor=processor),
        worker=RewardModelWorker, counted="pairs", images=partial(row_images, processor),
    )  # fmt: skip
