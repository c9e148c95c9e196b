"""A small step of rollouts with scores, and the configuration of any algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.algorithms import Algorithm, build_algorithm
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


class Token(NamedTuple):
    """A trained token, in float64: its log-probs now, before the update and by the engine, and its advantage."""

    now: Tensor
    before: Tensor
    by_engine: Tensor
    advantage: Tensor


def drifted(name: str, drift: float, **block: Any) -> tuple[Algorithm, Minibatch, Tensor]:
    """An algorithm, a minibatch in float64, and log-probs of a policy that has moved: by a normal with deviation
    `drift` at each token."""
    config = rl_config(name, **block)
    algorithm = build_algorithm(config)
    rewards = torch.tensor(REWARDS)
    e = minibatch(config, algorithm.advantages(scored(config), rewards, torch.tensor(GROUPS), 0.0, {"exact": rewards}))
    floats = {
        field.name: value.double()
        for field in fields(e)
        if isinstance(value := getattr(e, field.name), Tensor) and value.is_floating_point()
    }
    e = replace(e, **floats)
    assert e.old_logprobs is not None
    noise = torch.randn(len(MASK), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return algorithm, e, (e.old_logprobs + drift * noise).requires_grad_()


def completions(e: Minibatch, logprobs: Tensor) -> Iterator[list[Token]]:
    """The trained tokens of each completion."""
    assert e.old_logprobs is not None
    start = 0
    for length in LENGTHS:
        yield [
            Token(logprobs[t], e.old_logprobs[t], e.rollout_logprobs[t], e.advantages[t])
            for t in range(start, start + length)
            if MASK[t]
        ]
        start += length


def gradients(*losses: Tensor, of: Tensor) -> list[Tensor]:
    return [torch.autograd.grad(loss, of, retain_graph=True)[0] for loss in losses]


def require_equal(found: Tensor, wanted: Tensor, *, of: Tensor) -> None:
    """Assert that a loss and its gradient are those of an oracle in float64."""
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # loss weights are float32
    torch.testing.assert_close(*gradients(found, wanted, of=of), rtol=1e-6, atol=1e-12)
