"""Process reward model: a model and labelled steps in; a reward model that is read at the end of each step out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rlhf_core.chat.encoding import load_tokenizer
from rlhf_core.chat.step_tags import label_ids
from rlhf_core.config.stages.reward_models import ProcessRewardModelConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.models.folders.readers import STORED_LABELS, STORED_SEPARATOR, STORED_TAG
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.scalar_model import train_scalar_model
from rlhf_core.supervised.encoding import one_example
from rlhf_core.supervised.step_labels import StepLabelsWorker
from rlhf_core.supervised.targets import ProcessRewardModelWorker, labelled_steps, pack_targets


def run(
    config: ProcessRewardModelConfig, inputs: Mapping[str, Input], context: StageContext, cluster: Cluster
) -> Output:
    stored: dict[str, Any] = {STORED_SEPARATOR: config.separator}
    if config.in_token_form:
        labels = label_ids(load_tokenizer(inputs["model"].folder), config.labels)
        stored |= {STORED_TAG: config.step_tag, STORED_LABELS: labels}
    return train_scalar_model(
        config, inputs, context, cluster,
        encode=partial(one_example, labelled_steps), pack=pack_targets,
        worker=StepLabelsWorker if config.in_token_form else ProcessRewardModelWorker, counted="steps", **stored,
    )  # fmt: skip
