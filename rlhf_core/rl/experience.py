"""Packing of trajectories into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.errors import RewardError
from rlhf_core.kept_tokens import KeptTokens
from rlhf_core.models.vision import ImageProcessor, with_images
from rlhf_core.packing import pack
from rlhf_core.types import Branch, PackedBatch, Rollouts, TrainingBatch, Trajectory


def pack_trajectories(
    trajectories: Sequence[Trajectory], processor: ImageProcessor | None = None, *, truncated: bool = False
) -> Rollouts:
    """Pack all sequences of the trajectories of a step, in order.

    processor: the policy's, if prompts or environments have images. truncated: whether sampling was, so that each
    sampled token must be among those that were kept in its place.
    Raises ValueError if some trajectories have step rewards and others do not, or if kept tokens are missing.
    """
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    lengths = torch.tensor([s.token_ids.numel() for s in sequences])
    each = torch.tensor([len(t.sequences) for t in trajectories])
    packed = Rollouts(
        input_ids=torch.cat([s.token_ids for s in sequences]),
        sequence_lengths=lengths,
        loss_mask=torch.cat([s.loss_mask for s in sequences]),
        rollout_logprobs=torch.cat([s.rollout_logprobs for s in sequences]),
        episode_indices=torch.arange(len(trajectories)).repeat_interleave(each),
        process_rewards=_joined([t.step_rewards for t in trajectories]),
        step_ends=_joined([t.step_ends for t in trajectories]),
        kept_tokens=_kept_tokens(sequences) if truncated else None,
        temperatures=_temperatures(sequences),
    )
    images = [
        each for t in trajectories for each in (t.prompt.images + t.feedback_images, *(b.images for b in t.branches))
    ]
    return with_images(packed, images, processor)


def pack_hinted(trajectories: Sequence[Trajectory]) -> PackedBatch | None:
    """Pack the trajectories with hinted prompts, as the teacher reads them; return None if there are no hints.

    The sampled tokens are the same, in the same order. Raises ValueError for an episode of several sequences.
    """
    if not trajectories[0].prompt.hinted_ids:
        return None
    if any(trajectory.branches for trajectory in trajectories):
        raise ValueError("a hint stands before one sequence, but an episode has several")
    sequences, masks, temperatures = [], [], []
    kept: list[KeptTokens] = []
    for trajectory in trajectories:
        hinted, prompt_length = torch.tensor(trajectory.prompt.hinted_ids), len(trajectory.prompt.token_ids)
        sequences.append(torch.cat([hinted, trajectory.token_ids[prompt_length:]]))
        masks.append(torch.cat([torch.zeros_like(hinted, dtype=torch.bool), trajectory.loss_mask[prompt_length:]]))
        temperatures.append(torch.cat([torch.zeros(len(hinted)), _temperatures_of(trajectory)[prompt_length:]]))
        if trajectory.kept is not None:
            kept += [KeptTokens.nowhere(len(hinted)), trajectory.kept.after(prompt_length)]
    packed = replace(pack(sequences, masks), kept_tokens=KeptTokens.joined(kept).dense() if kept else None)
    differ = any(trajectory.temperatures is not None for trajectory in trajectories)
    return replace(packed, temperatures=torch.cat(temperatures)) if differ else packed


def _temperatures(sequences: Sequence[Trajectory | Branch]) -> Tensor | None:
    """Return the temperatures of all sequences, (N,) float32; None if all are those of the run."""
    if all(s.temperatures is None for s in sequences):
        return None
    return torch.cat([_temperatures_of(s) for s in sequences])


def _temperatures_of(sequence: Trajectory | Branch) -> Tensor:
    return torch.zeros(sequence.token_ids.numel()) if sequence.temperatures is None else sequence.temperatures


def _kept_tokens(sequences: Sequence[Trajectory | Branch]) -> Tensor:
    """Return the kept tokens of all sequences, (N, k) int32. Raises ValueError for a trained token that is not kept."""
    parts = [s.kept or KeptTokens.nowhere(s.token_ids.numel()) for s in sequences]
    kept, ids = KeptTokens.joined(parts).dense(), torch.cat([s.token_ids for s in sequences])
    if not ((kept == ids.unsqueeze(1)).any(1) | ~torch.cat([s.loss_mask for s in sequences])).all():
        raise ValueError(
            "a sampled token is not among those that truncated sampling kept, or the engine did not return these: its "
            "log-prob would be of another distribution"
        )
    return kept


def require_finite(batch: TrainingBatch, trajectories: Sequence[Trajectory]) -> None:
    """Raise RewardError, naming the row, if a value of a trained token is not finite: its update would be skipped."""
    for name in ("rewards", "advantages", "returns"):
        values: Tensor | None = getattr(batch, name)
        if values is None:
            continue
        if (not_finite := batch.loss_mask & ~values.isfinite()).any():
            position = int(not_finite.nonzero()[0])
            trajectory = trajectories[int(batch.episode_ids[position])]
            raise RewardError(
                f"row {trajectory.prompt.id}: of its {name}, one is {float(values[position])}: its reward is "
                f"{trajectory.reward:g}, and rewards of this size overflow in float32; scale or clip them"
            )


def without_truncated(batch: TrainingBatch, trajectories: Sequence[Trajectory]) -> TrainingBatch:
    """Return `batch` with truncated trajectories masked out of the loss: overlong filtering, section 3.4 of
    arXiv:2503.14476."""
    truncated = torch.tensor([t.finish_reason == "length" for t in trajectories])
    return replace(batch, loss_mask=batch.loss_mask & ~truncated[batch.episode_ids])


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if 0 < len(present) < len(parts):
        raise ValueError(f"{len(present)} of {len(parts)} trajectories have rewards of steps; all must have them")
    return torch.cat(present) if present else None
