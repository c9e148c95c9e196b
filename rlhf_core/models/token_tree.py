"""Packed sequences as a tree: shared prefixes are stored and computed once.

The prompt of a group of completions, or of a pair, is the trunk, its completions are the branches; an agent that
branches from one turn makes a deeper tree. In a causal model a token's result depends only on the tokens before it in
its sequence, so it is the same in all sequences with the same prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.packing import LEAST_SHARED
from rlhf_core.types import PackedBatch

# Segments share one call of attention while this bounds the padding, unless the call is small.
_MOST_PADDING = 1.25
_SMALL = 1 << 16  # pairs of query and key, padding included
_NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens that belong to the same sequences."""

    start: int  # its first token's place in the tree
    length: int
    before: Tensor  # (b,) int64: places of the tokens before it in its sequences


class AttentionGroup:
    """Segments whose attention is one call: g of them, with at most q tokens and k keys each."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        places = [torch.arange(segment.start, segment.start + segment.length) for segment in segments]
        lengths = torch.tensor([segment.length for segment in segments])
        self.queries = pad_sequence(places, batch_first=True)  # (g, q) int64: places in the tree, padded on the right
        self.keys = pad_sequence(  # (g, k) int64: of the tokens before a segment and its own, padded on the right
            [torch.cat([segment.before, part]) for segment, part in zip(segments, places, strict=True)],
            batch_first=True,
        )
        self.real = torch.arange(self.queries.shape[1]) < lengths.unsqueeze(1)  # (g, q) bool: which are no padding
        self._before = torch.tensor([segment.before.numel() for segment in segments])
        self._begins = not self._before.any()
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def to(self, device: torch.device) -> Self:
        """Move to `device`; `queries` and `keys` keep only their shape: TokenTree has those of all groups."""
        self.real, self._before = self.real.to(device), self._before.to(device)
        return self

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the addend of the attention scores, (g, 1, q, k), minus infinity where a query does not see a key.
        None: it sees its own and those before it, at the same place in the row. window: the number of last keys that
        it sees.

        All layers share it, since each keeps it for its backward pass.
        """
        if window is not None and window >= self.keys.shape[1]:
            window = None
        if window is None and self._begins:
            return None
        if (window, dtype) not in self._biases:
            device = self.real.device
            queries, keys = (torch.arange(part.shape[1], device=device) for part in (self.queries, self.keys))
            distances = (self._before.unsqueeze(1) + queries).unsqueeze(2) - keys
            hidden = distances < 0
            if window is not None:
                hidden |= distances >= window
            hidden &= self.real.unsqueeze(2)  # padding sees all: a softmax of nothing is NaN
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._biases[window, dtype] = bias.unsqueeze(1)
        return self._biases[window, dtype]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The calls of attention for consecutive tokens of a tree."""

    groups: tuple[AttentionGroup, ...]
    queries: Tensor  # (Q,) int64: of all groups, one after the other, row by row, counted from the first of the tokens
    keys: Tensor  # (K,) int64: likewise, as places in the tree
    order: Tensor  # where each of the tokens is among `queries`, int64

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, *, first: int = 0) -> Self:
        """Plan the attention of `segments`, whose tokens are the consecutive ones from `first` on."""
        groups = [AttentionGroup([segments[i] for i in group]) for group in _grouped(segments)]
        # The padding of a group has the place 0, which may be before `first`.
        queries = torch.cat([group.queries.flatten() for group in groups]).sub_(first).clamp_(min=0)
        keys = torch.cat([group.keys.flatten() for group in groups])
        real = torch.cat([group.real.flatten() for group in groups]).nonzero().squeeze(1)
        order = torch.empty_like(real).scatter_(0, queries[real], real)
        queries, keys, order = (part.to(device) for part in (queries, keys, order))
        return cls(tuple(group.to(device) for group in groups), queries, keys, order)


@dataclass(frozen=True)
class TokenTree:
    """n tokens that replace the N of a batch."""

    kept: Tensor  # (n,) int64: which token of the batch each is, the first of those that are the same
    places: Tensor  # (N,) int64: where each token of the batch is in the tree
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, batch: PackedBatch) -> Self:
        device = batch.input_ids.device
        kept, places, segments = _build_tree(batch.on_host)
        return cls(kept.to(device), places.to(device), tuple(segments))

    @classmethod
    def apart(cls, batch: PackedBatch) -> Self:
        """The tree in which no sequences share tokens: those of the batch, in order."""
        every = torch.arange(batch.num_tokens, device=batch.input_ids.device)
        lengths = batch.on_host.sequence_lengths
        starts = (lengths.cumsum(0) - lengths).tolist()
        segments = (Segment(start, length, _NOTHING) for start, length in zip(starts, lengths.tolist(), strict=True))
        return cls(every, every, tuple(segments))

    def padded(self, size: int) -> Self:
        """Return the tree of `size` tokens: padding is a further sequence, which no token of the batch is in."""
        length = len(self.kept)
        if size == length:
            return self
        kept = torch.cat([self.kept, self.kept.new_zeros(size - length)])
        return replace(self, kept=kept, segments=(*self.segments, Segment(length, size - length, _NOTHING)))

    @cached_property
    def plan(self) -> AttentionPlan:
        """The plan of all tokens."""
        return AttentionPlan.of(self.segments, self.kept.device)

    def planned(self, start: int, stop: int) -> AttentionPlan:
        """Plan the attention of the tokens at places start ... stop - 1 alone, to the keys of all."""
        parts = []
        for segment in self.segments:
            first, end = max(segment.start, start), min(segment.start + segment.length, stop)
            if first < end:
                before = torch.cat([segment.before, torch.arange(segment.start, first)])
                parts.append(Segment(first, end - first, before))
        return AttentionPlan.of(parts, self.kept.device, first=start)


def _build_tree(batch: PackedBatch) -> tuple[Tensor, Tensor, list[Segment]]:
    """Return `kept`, `places` and the segments of a batch in host memory."""
    lengths = batch.sequence_lengths.tolist()
    starts = (batch.sequence_lengths.cumsum(0) - batch.sequence_lengths).tolist()
    ids = [part.tolist() for part in batch.input_ids.split(lengths)]
    order = sorted(range(len(ids)), key=ids.__getitem__)  # so that those that begin alike are neighbours
    alike = {b: _common_length(ids[a], ids[b]) for a, b in pairwise(order)}
    places = torch.empty(batch.num_tokens, dtype=torch.int64)
    kept: list[Tensor] = []
    segments: list[Segment] = []
    size = 0
    pending = [(order, _NOTHING)]  # sequences, and the places of their common prefix
    while pending:
        sequences, before = pending.pop()
        depth = before.numel()
        for branch in _branches([i for i in sequences if lengths[i] > depth], alike, depth):
            end = min([lengths[branch[0]], *(alike[i] for i in branch[1:])])
            here = torch.arange(size, size + end - depth)
            kept.append(torch.arange(starts[branch[0]] + depth, starts[branch[0]] + end))
            segments.append(Segment(size, end - depth, before))
            for i in branch:
                places[starts[i] + depth : starts[i] + end] = here
            size += end - depth
            if len(branch) > 1:
                pending.append((branch, torch.cat([before, here])))
    return torch.cat(kept), places, segments


def _branches(sequences: Sequence[int], alike: dict[int, int], depth: int) -> Iterator[list[int]]:
    """Group neighbours that are alike up to `depth` by their continuation."""
    branch: list[int] = []
    for i in sequences:
        if branch and alike[i] < depth + LEAST_SHARED:
            yield branch
            branch = []
        branch.append(i)
    if branch:
        yield branch


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _grouped(segments: Sequence[Segment]) -> list[list[int]]:
    """Group segments of similar size; those that begin their sequences separately, which need no mask."""
    groups: list[list[int]] = []
    area, longest, most, roots = 0, 0, 0, False
    for i in sorted(range(len(segments)), key=lambda i: _size(segments[i]), reverse=True):
        segment = segments[i]
        keys, queries, root = segment.before.numel() + segment.length, segment.length, not segment.before.numel()
        area += keys * queries
        padded = max(most, keys) * max(longest, queries) * (len(groups[-1]) + 1 if groups else 1)
        if not groups or root != roots or padded > max(_SMALL, _MOST_PADDING * area):
            groups.append([])
            area, longest, most, roots = keys * queries, 0, 0, root
        groups[-1].append(i)
        longest, most = max(longest, queries), max(most, keys)
    return groups


def _size(segment: Segment) -> tuple[bool, int, int, int]:
    before = segment.before.numel()
    return before == 0, before + segment.length, segment.length, -segment.start
