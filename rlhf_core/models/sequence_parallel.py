"""Ranks that share the tokens of each batch: attention between their parts, and what they exchange.

A row of n tokens is cut into equal consecutive parts, one for each of P ranks; embeddings, norms, projections and MLP
process a rank's own tokens. Only attention needs the others. Where the query heads divide by P, the ranks exchange this
rank's tokens of all heads for all tokens of this rank's heads (DeepSpeed-Ulysses, arXiv:2309.14509), so that attention
is that of the whole row. Otherwise each rank gathers the keys and values of all tokens for its own queries.

Each rank of a replica has the whole loss. Every collective has its adjoint as backward pass, so a rank's gradients are
its part of the gradient of the sum of these P losses: P times its part of the loss's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.mesh import Mesh, current_mesh
from rlhf_core.models.token_tree import AttentionPlan, TokenTree

# Of query (1, H, q, d), key (1, G, k, d), value (1, G, k, e) and their plan, to (1, q, H, e).
Attention = Callable[[Tensor, Tensor, Tensor, AttentionPlan], Tensor]


@dataclass(frozen=True)
class CutTree:
    """This rank's part of a token tree's row."""

    tree: TokenTree  # of n tokens, a multiple of the ranks P that have a part each
    mesh: Mesh = field(default_factory=current_mesh)

    @property
    def ranks(self) -> int:
        return self.mesh.sequence

    @property
    def length(self) -> int:
        """The number of tokens of each part, n / P."""
        return len(self.tree.kept) // self.ranks

    @property
    def start(self) -> int:
        """The place of this part's first token in the tree."""
        return self.mesh.part * self.length

    @property
    def kept(self) -> Tensor:
        """(n / P,) int64: which token of the batch each token of this part is."""
        return self.tree.kept[self.start :][: self.length]

    def attention(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return `attention` of the whole row, (1, n / P, H, e), at the tokens of this part. All ranks must call it.

        query: (1, H, n / P, d); key: (1, G, n / P, d); value: (1, G, n / P, e). If P divides H but not G, key and value
        heads are repeated.
        """
        by_heads = query.shape[1] % self.ranks == 0
        return (self._by_heads if by_heads else self._by_queries)(attention, query, key, value)

    def _by_heads(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        times = self.ranks // math.gcd(key.shape[1], self.ranks)
        if times > 1:
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        parts = (query, key, value)
        # (P, n / P, H / P * d): by the rank that the heads belong to. One exchange for all.
        sent = [part.squeeze(0).unflatten(0, (self.ranks, -1)).transpose(1, 2).flatten(2) for part in parts]
        received = self._exchanged(torch.cat(sent, dim=-1)).flatten(0, 1).split([part.shape[-1] for part in sent], -1)
        rows = [  # (1, H / P, n, d)
            heads.unflatten(-1, (-1, part.shape[-1])).transpose(0, 1).unsqueeze(0)
            for heads, part in zip(received, parts, strict=True)
        ]
        output = attention(rows[0], rows[1], rows[2], self.tree.plan)
        back = self._exchanged(output.squeeze(0).flatten(1).unflatten(0, (self.ranks, -1)))  # (P, n / P, H / P * e)
        whole: Tensor = back.transpose(0, 1).flatten(1).unflatten(-1, (-1, value.shape[-1]))
        return whole.unsqueeze(0)

    def _exchanged(self, values: Tensor) -> Tensor:
        """Send values[r] to rank r; return those received, by sender. values: (P, n / P, ...)."""
        each = [1] * self.ranks
        return _exchanged(values, each, each, self.mesh)

    def _by_queries(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [part.squeeze(0).transpose(0, 1) for part in (key, value)]  # (n / P, G, d)
        whole = gathered(torch.cat(parts, dim=-1)).transpose(0, 1).unsqueeze(0)
        keys, values = whole.split([part.shape[-1] for part in parts], dim=-1)
        return attention(query, keys, values, self._own_plan)

    @cached_property
    def _own_plan(self) -> AttentionPlan:
        """The plan of this part's queries, over the keys of all."""
        return self.tree.planned(self.start, self.start + self.length)

    def dealt(self, values: Tensor, places: Tensor) -> Tensor:
        """Return the rows at this rank's `share` of `places` (M,) int64 in the tree.

        values: (n / P, d), of this part. Only these rows are sent, and equally many to each rank, wherever they are.
        """
        owners = places // self.length
        readers = torch.arange(len(places), device=places.device) // max(_share(len(places), self.ranks), 1)
        own, read = owners == self.mesh.part, owners[share(len(places))]
        sent, received = (torch.bincount(ranks, minlength=self.ranks).tolist() for ranks in (readers[own], read))
        rows = _exchanged(values.index_select(0, places[own] - self.start), sent, received, self.mesh)
        order = torch.argsort(read, stable=True)  # in which they are received: by owner
        return rows.index_select(0, torch.argsort(order))


def share(count: int) -> slice:
    """Return this rank's share of `count` rows: equally many for each, less or none for the last ones."""
    mesh = current_mesh()
    size = _share(count, mesh.sequence)
    return slice(min(mesh.part * size, count), min((mesh.part + 1) * size, count))


def _share(count: int, ranks: int) -> int:
    return math.ceil(count / ranks)


def all_shares(values: Tensor, count: int) -> Tensor:
    """Return the `count` rows of which each rank has its `share`, `values`."""
    size = _share(count, current_mesh().sequence)
    padding = values.new_zeros(size - len(values), *values.shape[1:])
    return gathered(torch.cat([values, padding]))[:count]


def gathered(values: Tensor) -> Tensor:
    """Return the rows of all ranks that share tokens (P * m, ...), of those of each (m, ...)."""
    result: Tensor = _Gathered.apply(values, current_mesh())  # type: ignore[no-untyped-call]
    return result


def summed(values: Tensor) -> Tensor:
    """Return the sum of `values` over the ranks that share tokens."""
    result: Tensor = _Summed.apply(values, current_mesh())  # type: ignore[no-untyped-call]
    return result


def _exchanged(values: Tensor, sent: Sequence[int], received: Sequence[int], mesh: Mesh) -> Tensor:
    """Send `sent` rows of `values` to each rank, in their order; return the `received` rows, by sender."""
    result: Tensor = _Exchanged.apply(values, sent, received, mesh)  # type: ignore[no-untyped-call]
    return result


class _Exchanged(torch.autograd.Function):
    """An all-to-all of rows. Its adjoint sends every row back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sent: Sequence[int], received: Sequence[int], mesh: Mesh) -> Tensor:
        ctx.sizes, ctx.mesh = (received, sent), mesh
        # Not `empty_like`, which keeps the strides of a transposed tensor: the collective fills memory in order.
        output = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(output, values.contiguous(), list(received), list(sent), group=_group(mesh))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return _exchanged(gradients[0], sent, received, ctx.mesh), None, None, None


class _Gathered(torch.autograd.Function):
    """An all-gather of rows. Its adjoint sums the gradients of each rank's rows there."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        output = values.new_empty(mesh.sequence * len(values), *values.shape[1:])
        dist.all_gather_single(output, values.contiguous(), group=_group(mesh))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        output = gradient.new_empty(len(gradient) // ctx.mesh.sequence, *gradient.shape[1:])
        dist.reduce_scatter_single(output, gradient.contiguous(), group=_group(ctx.mesh))
        return output, None


class _Summed(torch.autograd.Function):
    """A sum over ranks, which is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        output = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(output, group=_group(mesh))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(output, group=_group(ctx.mesh))
        return output, None


def _group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share tokens; None: all ranks."""
    return mesh.groups.get("sequence")
