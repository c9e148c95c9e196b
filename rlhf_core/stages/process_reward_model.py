"""Process reward model: a model and labelled steps in; a reward model that is read at the end of each step out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.models.folders.readers import STORED_SEPARATOR
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.scalar_model import train_scalar_model
from rlhf_core.supervised.encoding import one_example
from rlhf_core.supervised.targets import ProcessRewardModelWorker, labelled_steps, pack_targets


def run(
    config: ProcessRewardModelConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster
) -> Output:
    return train_scalar_model(
        config, inputs, context, cluster,
        encode=partial(one_example, labelled_steps), pack=pack_targets,
        worker=ProcessRewardModelWorker, counted="steps", **{STORED_SEPARATOR: config.separator},
    )  # fmt: skip
