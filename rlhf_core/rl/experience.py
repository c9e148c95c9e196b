"""Trajectories become one packed experience, and the experience becomes equal shares of work for the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_core.packing import filler, plan_micro_batches, select
from rlhf_core.types import Experience, PackedBatch, Trajectory

B = TypeVar("B", bound=PackedBatch)


def pack_trajectories(trajectories: Sequence[Trajectory]) -> Experience:
    """All trajectories of a step, end to end, in their order. Steps are rewarded in all of them or in none."""
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


@dataclass(frozen=True)
class Layout:
    """Which sequences of a batch each rank works on, micro-batch by micro-batch; as many of them on every rank."""

    plan: list[list[list[int]]]  # [rank][micro-batch] -> sequence indices; an empty list is a filler

    @classmethod
    def balanced(cls, batch: PackedBatch, *, ranks: int, tokens_per_micro_batch: int) -> Layout:
        lengths = batch.sequence_lengths.tolist()
        return cls(plan_micro_batches(lengths, ranks=ranks, tokens_per_micro_batch=tokens_per_micro_batch))

    def split(self, batch: B) -> list[list[B]]:
        """[rank][micro-batch] -> that part of `batch`."""
        return [[select(batch, part) if part else filler(batch) for part in rank] for rank in self.plan]

    def join(self, batch: PackedBatch, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """The inverse of `split` for results: [rank][micro-batch] tensors of (n,) tokens -> (N,), in batch order."""
        pieces: list[Tensor | None] = [None] * batch.num_sequences
        lengths = batch.sequence_lengths.tolist()
        for rank_plan, rank_parts in zip(self.plan, parts, strict=True):
            for indices, values in zip(rank_plan, rank_parts, strict=True):
                if indices:
                    for index, piece in zip(indices, values.split([lengths[i] for i in indices]), strict=True):
                        pieces[index] = piece
        return torch.cat([piece for piece in pieces if piece is not None])
