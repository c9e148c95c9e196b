"""Trajectories become one packed experience."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_core.types import Experience, Trajectory


def pack_trajectories(trajectories: Sequence[Trajectory]) -> Experience:
    """All trajectories of a step, end to end, in their order. All of them have rewards of steps, or none has."""
    lengths = torch.tensor([t.token_ids.numel() for t in trajectories])
    return Experience(
        input_ids=torch.cat([t.token_ids for t in trajectories]),
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        sequence_lengths=lengths,
        loss_mask=torch.cat([t.loss_mask for t in trajectories]),
        rollout_logprobs=torch.cat([t.rollout_logprobs for t in trajectories]),
        sequence_indices=torch.arange(len(trajectories)),
        process_rewards=_joined([t.step_rewards for t in trajectories]),
        step_ends=_joined([t.step_ends for t in trajectories]),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if 0 < len(present) < len(parts):
        raise ValueError(f"{len(present)} of {len(parts)} trajectories have rewards of steps; all must have them")
    return torch.cat(present) if present else None
