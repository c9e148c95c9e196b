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
from rlhf_core.training.muon import Muon

# Muon gathers the gradients of one group at a time: 0.5 GiB in float32.
_MUON_GROUP_ELEMENTS = 1 << 27


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total_steps`.

    Rises linearly over ceil(warmup_share * total_steps) steps, the first of which is not 0; then `constant`, or falls
    (`linear`, or along a half `cosine`, arXiv:1608.03983) so that the last step has final_learning_rate_share of it.
    Beyond the last step it stays at the last rate.
    """
    warmup = math.ceil(config.warmup_share * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    falling = max(total_steps - 1 - warmup, 1)
    progress = min((step - warmup) / falling, 1.0)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    final = config.final_learning_rate_share
    return config.learning_rate * (final + (1 - final) * left)


def build_optimizer(model: nn.Module, engine: EngineConfig, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of the trained parameters of `model` (PolicyModel, ScalarModel, ...).

    Each group has `lr_scale`, by which the step's learning rate is multiplied. Raises ValueError if nothing is trained.
    """
    if config.name == "muon":
        settings = config.muon or MuonConfig()
        dtype = torch_dtype(engine.dtype)  # as all matrix products of this engine
        return Muon(muon_groups(model, config, settings), settings, betas=config.betas, dtype=dtype)
    # One pass over the weights, in host memory too, and there on all cores at once.
    return torch.optim.AdamW(parameter_groups(model, config), betas=config.betas, fused=True)


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Trained parameters in two groups: matrices decay, vectors (norms, biases) do not. Raises ValueError if none."""
    return _by_decay(_trained(model), config.weight_decay, lr_scale=1.0)


def muon_groups(model: nn.Module, config: OptimizerConfig, settings: MuonConfig) -> list[dict[str, Any]]:
    """Groups with `muon` true: the matrices of the backbone, embeddings excepted; the rest as in `parameter_groups`.

    Raises ValueError if nothing is trained, StageError if there is no such matrix.
    """
    trained = _trained(model)
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    assert isinstance(model.model, nn.Module)
    hidden = {id(p) for p in backbone(base_model(model.model)).parameters() if p.ndim == 2} - embeddings
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
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay, "lr_scale": lr_scale},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr_scale": lr_scale},
    ]
    return [group for group in groups if group["params"]]


def _shares(parameters: Iterable[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, in lists of at most `limit` elements (a longer parameter is a list of its own)."""
    share: list[nn.Parameter] = []
    for parameter in parameters:
        if share and sum(p.numel() for p in share) + parameter.numel() > limit:
            yield share
            share = []
        share.append(parameter)
    yield share
