"""A small step of rollouts with scores, and the configuration of any algorithm."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_core.config.rl.algorithm_table import ALGORITHMS
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.losses.aggregation import loss_weights
from rlhf_core.types import Minibatch, Scored, TrainingBatch

NAMES = tuple(ALGORITHMS)
BASE = {
    "dataset": "prompts", "steps": 1, "prompts_per_step": 2,
    "sampling": {"max_tokens": 4}, "rollout": {"max_length": 8},
}  # fmt: skip
OPTIMIZER = {"learning_rate": 1e-3}


def rl_config(algorithm: str, **settings: Any) -> RLConfig:
    block = {"rewards": {"exact": {"type": "verifier"}}, "optimizer": OPTIMIZER, "group_size": 2, **settings}
    if algorithm == "ppo":
        block["critic"] = {"optimizer": OPTIMIZER}
    if algorithm == "on-policy-distillation":
        block["teacher"] = {"model": "teacher", **(block.get("teacher") or {})}
    return RLConfig.model_validate({**BASE, "algorithm": algorithm, ALGORITHMS[algorithm].block: block})


# Four completions, two of each of two prompts. The second has an environment's token between the policy's.
LENGTHS = (4, 5, 2, 3)
MASK = (False, False, True, True, False, True, False, True, True, False, True, False, True, True)
REWARDS, GROUPS = (1.0, 0.0, 0.5, 2.0), (7, 7, 3, 3)
ENDS = (False, False, True, True, False, True, False, False, True, False, True, False, False, True)
STEPS = (0.0, 0.0, 1.0, -0.5, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.25, 0.0, 0.0, 1.0)


def scored(config: RLConfig, **fields: torch.Tensor | None) -> Scored:
    """With random log-probs and values."""
    generator = torch.Generator().manual_seed(0)
    mask, lengths = torch.tensor(MASK), torch.tensor(LENGTHS)

    def draw() -> torch.Tensor:
        return torch.where(mask, torch.randn(len(MASK), generator=generator), 0.0)

    old, ref, values = draw() - 2, draw() - 2, draw()
    teacher = draw() - 2
    known: dict[str, Any] = {
        "teacher_logprobs": teacher,
        "loss_mask": mask, "values": values,
        "old_logprobs": old, "ref_logprobs": ref, "rollout_logprobs": old + 0.1 * draw(),
    }  # fmt: skip
    return Scored(
        input_ids=torch.arange(len(MASK)),
        sequence_lengths=lengths,
        **known | fields,
    )


def minibatch(config: RLConfig, batch: TrainingBatch) -> Minibatch:
    """With the loss weights of one optimizer step on all of `batch`."""
    weights = loss_weights(
        batch.loss_mask, batch.sequence_lengths, config.settings.aggregation,
        length=config.settings.aggregation_length or config.sampling.max_tokens,
    )  # fmt: skip
    return Minibatch(**vars(batch), loss_weights=weights)
