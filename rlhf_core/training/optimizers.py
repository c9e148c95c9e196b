"""The optimizer, its parameter groups, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rlhf_core.config.engines.training import EngineConfig
from rlhf_core.config.stages.trained import MuonConfig, OptimizerConfig
from rlhf_core.errors import StageError
from rlhf_core.models.adapters import base_model
from rlhf_core.models.loading import torch_dtype
from rlhf_core.models.output_head import backbone
from rlhf_core.models.sharded_loading import full_shape
from rlhf_core.training.muon import Muon

# Muon gathers the gradients of one group at a time: 0.5 GiB in float32.
_MUON_GROUP_ELEMENTS = 1 << 27


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `total_steps`.

    Linear warmup over ceil(warmup_share * total_steps) steps, above 0 from the first; then `constant`, or a decay
    (`linear`, or half a `cosine`, arXiv:1608.03983) to final_learning_rate_share of the peak at the last step.
    Later steps have the rate of the last one.
    """
    warmup = math.ceil(config.warmup_share * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    decay_steps = max(total_steps - 1 - warmup, 1)
    progress = min((step - warmup) / decay_steps, 1.0)
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    final = config.final_learning_rate_share
    return config.learning_rate * (final + (1 - final) * remaining)


def build_optimizer(model: nn.Module, engine: EngineConfig, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build the optimizer of the trained parameters of `model` (PolicyModel, ScalarModel, ...).

    Each group has `lr_scale`, a factor of the step's learning rate. Raises ValueError if no parameter is trained.
    """
    if config.name == "muon":
        settings = config.muon or MuonConfig()
        dtype = torch_dtype(engine.dtype)  # as all matrix products of this engine
        groups = muon_groups(model, config, settings)
        return Muon(groups, settings, betas=config.betas, epsilon=config.epsilon, dtype=dtype)
    # Fused: one pass over the weights, on all cores if they are in host memory.
    groups = parameter_groups(model, config)
    return torch.optim.AdamW(groups, betas=config.betas, eps=config.epsilon, fused=True)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return matrices with weight decay, vectors (norms, biases) without. Raises ValueError if nothing is trained."""
    return _by_decay(_trained(model), config.weight_decay, lr_scale=1.0)


def muon_groups(model: nn.Module, config: OptimizerConfig, settings: MuonConfig) -> list[dict[str, Any]]:
    """Return groups with `muon` true for the backbone's matrices except embeddings, and the rest as `parameter_groups`.

    Raises ValueError if no parameter is trained, StageError if no such matrix is.
    """
    trained = _trained(model)
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    assert isinstance(model.model, nn.Module)
    hidden = {id(p) for p in backbone(base_model(model.model)).parameters() if len(full_shape(p)) == 2} - embeddings
    matrices = [p for p in trained if id(p) in hidden]
    if not matrices:
        raise StageError("optimizer.name is muon, but no matrix of a hidden layer is trained here; use adamw")
    groups = [
        {"params": share, "weight_decay": config.weight_decay, "lr_scale": 1.0, "muon": True}
        for share in _shares(matrices, _MUON_GROUP_ELEMENTS)
    ]
    rest = [p for p in trained if id(p) not in hidden]
    scale = (settings.adamw_learning_rate or config.learning_rate) / config.learning_rate
    groups += [group | {"muon": False} for group in _by_decay(rest, config.weight_decay, lr_scale=scale)]
    return [group | {"index": i} for i, group in enumerate(groups)]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter that requires a gradient")
    return trained


def _by_decay(parameters: Iterable[nn.Parameter], weight_decay: float, *, lr_scale: float) -> list[dict[str, Any]]:
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in parameters if _dimensions(p) >= 2],
            "weight_decay": weight_decay,
            "lr_scale": lr_scale,
        },
        {"params": [p for p in parameters if _dimensions(p) < 2], "weight_decay": 0.0, "lr_scale": lr_scale},
    ]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: nn.Parameter) -> int:
    return len(full_shape(parameter))


def _shares(parameters: Iterable[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Split the parameters in order into lists of at most `limit` elements; a larger parameter has its own list."""
    share: list[nn.Parameter] = []
    for parameter in parameters:
        if share and sum(full_shape(p).numel() for p in [*share, parameter]) > limit:
            yield share
            share = []
        share.append(parameter)
    yield share
