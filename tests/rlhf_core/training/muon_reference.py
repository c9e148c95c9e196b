"""Muon in float64, written without any of our code."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf_core.config.stages.trained import MuonConfig
from rlhf_core.models.loading import load_causal_model
from rlhf_core.models.packed import PolicyModel
from tests.rlhf_core.training.tiny_engine import batch, loss


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """The same polynomial of the singular values, by SVD in float64: no iteration on matrices."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def reference(weight: Tensor, gradients: list[Tensor], config: MuonConfig, *, lr: float, decay: float) -> Tensor:
    """The weight after one step a gradient, in float64."""
    weight = weight.double()
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = config.momentum * momentum + gradient.double()  # the classical form: its scale does not matter
        direction = gradient.double() + config.momentum * momentum if config.nesterov else momentum
        rows, columns = weight.shape
        original = config.scale == "original"
        scale = math.sqrt(max(1, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
        weight = weight - lr * decay * weight - lr * scale * newton_schulz(direction, config.ns_steps)
    return weight


def reference_steps(folder: Path, steps: int) -> dict[str, Tensor]:
    """The same steps in plain torch, Muon's by the float64 reference."""
    model = load_causal_model(folder, dtype=torch.float32, attention="eager")
    named = dict(model.named_parameters())
    hidden = {name for name in named if name.endswith("_proj.weight")}
    start = {name: named[name].detach().clone() for name in hidden}
    gradients: dict[str, list[Tensor]] = {name: [] for name in hidden}
    groups = [
        {"params": [p for n, p in named.items() if n not in hidden and p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for _ in range(steps):
        model.zero_grad()
        loss(PolicyModel(model), batch())[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        for name in hidden:
            gradient = named[name].grad
            assert gradient is not None
            gradients[name].append(gradient.clone())
            after = reference(start[name], gradients[name], MuonConfig(), lr=0.02, decay=0.1)
            named[name].data.copy_(after)
    return {name: parameter.detach() for name, parameter in named.items()}
