"""Rewarded trajectories as JSON values, for checkpoints. Numbers are kept to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rlhf_core.types import Prompt, Stretch, Trajectory

_TENSORS = {
    "token_ids": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32,
    "step_rewards": torch.float32, "step_ends": torch.bool,
}  # fmt: skip


def stored(trajectory: Trajectory) -> dict[str, Any]:
    """All but its prompt."""
    values = {f.name: getattr(trajectory, f.name) for f in fields(trajectory) if f.name != "prompt"}
    stretches = [[stretch.tokens, stretch.weight_version] for stretch in trajectory.stretches]
    return {
        **{name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()},
        "stretches": stretches,
    }


def trajectory_of(values: Mapping[str, Any], prompt: Prompt) -> Trajectory:
    """What `stored` was given; prompt: its own."""
    tensors = {n: torch.tensor(values[n], dtype=dtype) for n, dtype in _TENSORS.items() if values[n] is not None}
    messages = None if values["messages"] is None else tuple(values["messages"])
    stretches = tuple(Stretch(tokens, version) for tokens, version in values["stretches"])
    return Trajectory(prompt=prompt, **{**values, **tensors, "messages": messages, "stretches": stretches})
