"""Log-probs and entropy of next tokens without a (rows, vocabulary) tensor alive for all rows at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Logits of one chunk: 64 MiB in float32. Blocks below 32 MiB glibc does not give back, and then everything stays.
CHUNK_ELEMENTS = 1 << 24


class Head(Protocol):
    """A linear layer, or what else makes logits (M, V) of hidden states (M, d)."""

    def __call__(self, hidden: Tensor, /) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def chunked_logprobs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(head(hidden) / temperature)[targets], in float32, and the entropy of each distribution (nats).

    hidden: (M, d); targets: (M,) int64; both results: (M,) float32. Logits are computed a chunk of rows at a time and
    again in backward (if they are more than one chunk). Every rank makes the same calls of `head`, forward and
    backward, since each is a collective under ZeRO-3.
    """
    rows = hidden.shape[0]
    chunks = _same_on_all_ranks(math.ceil(rows * vocabulary / chunk_elements), head, hidden.device)
    parts: list[tuple[Tensor, Tensor]] = []
    for part_hidden, part_targets in zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
        arguments = (head, part_hidden, part_targets, temperature, with_entropy)
        if not torch.is_grad_enabled() or chunks == 1:
            parts.append(_chunk(*arguments))  # nothing to save by computing it twice
            continue
        # Under ZeRO-3 the head's weight is gathered in recomputation but already released when shapes are compared.
        result = checkpoint(_chunk, *arguments, use_reentrant=False, determinism_check="none")
        parts.append(cast(tuple[Tensor, Tensor], result))
    logprobs = torch.cat([logprob for logprob, _ in parts])
    return logprobs, torch.cat([entropy for _, entropy in parts]) if with_entropy else None


def _chunk(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    # Not logit - logsumexp: where logits are large, so is the rounding of that difference.
    distribution = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = distribution.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return logprobs, logprobs.detach()
    return logprobs, -(distribution.exp() * distribution).sum(-1)


def _same_on_all_ranks(chunks: int, head: Head, device: torch.device) -> int:
    """The largest number of chunks of any rank, where the head's weight is sharded; at least one."""
    chunks = max(chunks, 1)
    sharded = any(hasattr(parameter, "ds_id") for parameter in head.parameters())
    if not sharded or not dist.is_initialized() or dist.get_world_size() == 1:
        return chunks
    count = torch.tensor(chunks, device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return int(count)
