"""Sequences become packed batches, and packed batches become equal work for every rank."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_core.types import PackedBatch, PreferenceBatch

B = TypeVar("B", bound=PackedBatch)
Rule = Callable[[Tensor], Tensor]

# A sequence of T tokens costs about T * (1 + T / ATTENTION_TOKENS): the linear layers, and the attention.
ATTENTION_TOKENS = 4096


def pack(token_ids: Sequence[Sequence[int] | Tensor], loss_masks: Sequence[Sequence[bool] | Tensor]) -> PackedBatch:
    """Lay sequences end to end. token_ids: S sequences of T_s >= 1 tokens; loss_masks: as many, of the same lengths.

    Raises ValueError on an empty batch, an empty sequence, or lengths that differ.
    """
    ids = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in token_ids]
    masks = [torch.as_tensor(mask, dtype=torch.bool) for mask in loss_masks]
    if not ids or len(ids) != len(masks):
        raise ValueError(f"pack: {len(ids)} sequences with {len(masks)} masks; as many of both, and at least one")
    for i, (sequence, mask) in enumerate(zip(ids, masks, strict=True)):
        if sequence.numel() == 0 or sequence.shape != mask.shape:
            raise ValueError(f"pack: sequence {i} has {sequence.numel()} tokens and a mask of {mask.numel()}")
    return PackedBatch(
        input_ids=torch.cat(ids),
        position_ids=torch.cat([torch.arange(sequence.numel()) for sequence in ids]),
        sequence_lengths=torch.tensor([sequence.numel() for sequence in ids]),
        loss_mask=torch.cat(masks),
    )


def select(batch: B, indices: Sequence[int]) -> B:
    """The sequences `indices` of `batch`, in that order, with all their fields.

    Fields of (N,) are sliced by token, fields of (S,) by sequence; fields of (S / 2,), one value a pair, by pair, for
    which `indices` must hold whole pairs (2i, 2i + 1).
    """
    chosen = torch.as_tensor(list(indices), dtype=torch.int64)
    ends = batch.sequence_lengths.cpu().cumsum(0)
    starts = ends - batch.sequence_lengths.cpu()
    tokens = torch.cat([torch.arange(int(starts[i]), int(ends[i])) for i in chosen.tolist()])
    return _map_fields(
        batch,
        by_token=lambda value: value[tokens.to(value.device)],
        by_sequence=lambda value: value[chosen.to(value.device)],
        by_pair=lambda value: value[_pairs(chosen).to(value.device)],
    )


def _pairs(chosen: Tensor) -> Tensor:
    first, second = chosen[0::2], chosen[1::2]
    if chosen.numel() % 2 or bool((first % 2 != 0).any()) or not torch.equal(second, first + 1):
        raise ValueError(f"select: {chosen.tolist()} are not whole pairs; a pair is sequence 2i with sequence 2i + 1")
    return first // 2


# Named, not guessed from shapes: with one-token sequences N equals S.
_BY_SEQUENCE = frozenset({"sequence_lengths", "sequence_indices"})
_BY_PAIR = frozenset({"margins"})


def _map_fields(batch: B, *, by_token: Rule, by_sequence: Rule, by_pair: Rule) -> B:
    changed = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if value is None:
            continue
        rule = by_sequence if field.name in _BY_SEQUENCE else by_pair if field.name in _BY_PAIR else by_token
        changed[field.name] = rule(value)
    return replace(batch, **changed)


def concatenate(batches: Sequence[B]) -> B:
    """The batches' sequences one after the other. A field must be there in all of them or in none (ValueError)."""
    if not batches:
        raise ValueError("concatenate: no batches")
    joined: dict[str, Tensor] = {}
    for field in fields(batches[0]):
        values = [getattr(batch, field.name) for batch in batches]
        if all(value is None for value in values):
            continue
        if any(value is None for value in values):
            raise ValueError(f"concatenate: some batches have `{field.name}` and some have not")
        joined[field.name] = torch.cat(values)
    return replace(batches[0], **joined)


def filler(batch: B) -> B:
    """A batch of one sequence (one pair, where `batch` holds pairs) of which no token is trained.

    A rank without work of its own runs it, so that all ranks make the same collective calls.
    """
    shortest = select(batch, [0, 1] if isinstance(batch, PreferenceBatch) else [int(batch.sequence_lengths.argmin())])
    return replace(shortest, loss_mask=torch.zeros_like(shortest.loss_mask))


def plan_micro_batches(
    lengths: Sequence[int], *, ranks: int, tokens_per_micro_batch: int, unit: int = 1
) -> list[list[list[int]]]:
    """Which sequences each rank runs, micro-batch by micro-batch: plan[rank][micro_batch] -> sequence indices.

    Cost counts tokens and, for attention, their square; ranks get as equal cost as greedy assignment finds. All ranks
    have the same number of micro-batches; an empty list stands for `filler`. A micro-batch holds at most
    `tokens_per_micro_batch` tokens unless a single unit is longer. Sequences of similar length share a micro-batch.
    unit: sequences that must stay together in order, 2 for preference pairs.
    """
    if ranks < 1 or len(lengths) % unit:
        raise ValueError(f"plan_micro_batches: {len(lengths)} sequences in units of {unit} over {ranks} ranks")
    units = [tuple(range(start, start + unit)) for start in range(0, len(lengths), unit)]
    sizes = [sum(lengths[i] for i in members) for members in units]
    costs = [sum(lengths[i] * (1 + lengths[i] / ATTENTION_TOKENS) for i in members) for members in units]
    shares = _balance(costs, ranks)
    counts = [len(_fill(share, sizes, tokens_per_micro_batch)) for share in shares]
    most = max(1, *counts)
    plan = []
    for share in shares:
        micro_batches = _fill(share, sizes, tokens_per_micro_batch)
        micro_batches += [[]] * (most - len(micro_batches))
        plan.append([[i for index in micro_batch for i in units[index]] for micro_batch in micro_batches])
    return plan


def _balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Longest job first onto the least loaded rank (Graham, 1969)."""
    loads = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return shares


def _fill(share: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Micro-batches of neighbours in length (the share is sorted by cost), each within the limit."""
    micro_batches: list[list[int]] = []
    tokens = 0
    for index in share:
        if not micro_batches or tokens + sizes[index] > limit:
            micro_batches.append([])
            tokens = 0
        micro_batches[-1].append(index)
        tokens += sizes[index]
    return micro_batches
