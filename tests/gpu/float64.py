"""What models and optimizers compute in float64 on the CPU, each sequence alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlhf_core.config.stages.trained import OptimizerConfig
from rlhf_core.training.optimizers import learning_rate
from rlhf_core.types import PackedBatch


def logprobs(model: Any, batch: PackedBatch) -> Tensor:
    """(N,) of each token given those before it, 0 at the first of a sequence, by the model's own forward."""
    found = []
    for ids in batch.input_ids.split(batch.sequence_lengths.tolist()):
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        found.append(torch.cat([chosen.new_zeros(1), chosen]))
    return torch.cat(found)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.detach().cpu().double() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The norm of the difference over all tensors, relative to that of the expected ones."""
    assert found.keys() == expected.keys()
    exact = {name: tensor.detach().cpu().double() for name, tensor in expected.items()}
    difference = sum(float((found[name].detach().cpu().double() - exact[name]).square().sum()) for name in exact)
    return (difference / sum(float(tensor.square().sum()) for tensor in exact.values())) ** 0.5


def adamw_steps(
    folder: Path, batch: PackedBatch, config: OptimizerConfig, *, tokens: int, steps: int, total: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights before and after, and the gradient's norm of each step.

    The loss is minus the sum of the trained tokens' log-probs, divided by `tokens`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == decays], "weight_decay": decay}
        for decays, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.betas)
    norms = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, total)
        optimizer.zero_grad()
        (-(logprobs(model, batch) * batch.loss_mask).sum() / tokens).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)))
        optimizer.step()
    return before, {name: p.detach() for name, p in model.named_parameters()}, norms
