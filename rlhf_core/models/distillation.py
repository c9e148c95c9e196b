"""Divergence of a student's distributions from a teacher's, a chunk of rows at a time: no (rows, vocabulary) tensor of
either is alive for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_core.models.logprobs import CHUNK_ELEMENTS, Head, by_chunks, log_distribution, target_logprobs
from rlhf_core.models.packed import CausalModel, PolicyModel
from rlhf_core.models.sequence_parallel import all_shares
from rlhf_core.models.shift import predicted_places
from rlhf_core.types import PackedBatch


@dataclass(frozen=True)
class Taught:
    """A teacher's distributions of M rows, and the divergence from them.

    divergence: of log q (m, V) of some rows at `temperature`, and those rows of `rows`: see losses/divergence.py.
    """

    rows: tuple[Tensor, ...]  # each (M, ...)
    divergence: Callable[..., tuple[Tensor, Tensor]]
    temperature: float
    heads: tuple[Head, ...] = ()  # that `divergence` calls


def by_teacher(
    divergence: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], head: Head, hidden: Tensor, temperature: float
) -> Taught:
    """Build a target from a teacher's head and its last hidden states (M, d)."""

    def to_teacher(student: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return divergence(student, log_distribution(head(rows), temperature).to(student.dtype))

    return Taught((hidden,), to_teacher, temperature, (head,))


def chunked_divergence(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    taught: Taught,
    *,
    vocabulary: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(head(hidden))[targets], and the divergence of softmax(head(hidden) / temperature) from the
    teacher's.

    hidden: (M, d); targets: (M,) int64; both results: (M,) float32, the divergence in nats, not multiplied by the
    square of the temperature. As in `chunked_logprobs`, a chunk of rows at a time, and again in backward.
    """
    chunk = partial(_chunk, head, taught)
    return by_chunks(chunk, [hidden, targets, *taught.rows], [head, *taught.heads], vocabulary, chunk_elements)


def _chunk(head: Head, taught: Taught, hidden: Tensor, targets: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logprobs, _ = target_logprobs(logits, targets)
    divergence: Tensor = _Divergence.apply(logits, taught, *rows)  # type: ignore[no-untyped-call]
    return logprobs, divergence


class _Divergence(torch.autograd.Function):
    """Keeps only the gradient: one tensor of the size of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, taught: Taught, *rows: Tensor) -> Tensor:
        divergence, gradient = taught.divergence(log_distribution(logits, taught.temperature), *rows)
        ctx.save_for_backward(gradient)
        ctx.temperature, ctx.dtype, ctx.rows = taught.temperature, logits.dtype, len(rows)
        return divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        of_logits = gradient * (gradients[0] / ctx.temperature).unsqueeze(-1)
        return of_logits.to(ctx.dtype), None, *(None for _ in range(ctx.rows))


class StudentModel(PolicyModel):
    """A causal language model that learns from a teacher."""

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        only: Tensor | None = None,
        with_routing: bool = False,
        taught: Taught | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run PolicyModel.forward; with `taught`, whose rows are the `own_rows` of the tokens in `only`, the second
        result is the divergence (N,) float32 from the teacher, and the log-probs are of temperature 1.
        """
        if taught is None:
            return super().forward(
                batch, temperature=temperature, with_entropy=with_entropy, only=only, with_routing=with_routing
            )
        places, hidden, routing = self._predicted(batch, only, with_routing=with_routing)
        logprobs, divergence = chunked_divergence(
            self.head, hidden, batch.input_ids[places], taught, vocabulary=self._vocabulary,
            chunk_elements=self._chunk_elements,
        )  # fmt: skip
        return self._of_batch(logprobs, places, batch), self._of_batch(divergence, places, batch), routing


class TeacherModel(CausalModel):
    """A frozen causal language model whose distributions are computed later, from its hidden states."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return the hidden states (M, d) that predict the M trained tokens, in order; of these the `own_rows`."""
        return self._predicted(batch, batch.loss_mask)[1]


class TopModel(CausalModel):
    """A frozen causal language model that returns its most probable tokens."""

    def forward(self, batch: PackedBatch, *, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the most probable tokens (M, k) int64 at each of the M trained ones (all, if the vocabulary is no
        larger), and (M, k + 1) float32 their log-probs, and that of all others together.
        """

        def top(hidden: Tensor) -> tuple[Tensor, Tensor]:
            distribution = log_distribution(self.head(hidden), temperature)
            logprobs, tokens = distribution.topk(min(k, distribution.shape[-1]))
            rest = distribution.scatter_(-1, tokens, float("-inf")).logsumexp(-1, keepdim=True)
            return tokens, torch.cat([logprobs, rest], dim=-1)

        _, hidden, _ = self._predicted(batch, batch.loss_mask)
        tokens, logprobs = by_chunks(top, [hidden], [self.head], self._vocabulary, self._chunk_elements)
        if not self.layouts.cut:
            return tokens, logprobs
        count = len(predicted_places(batch, batch.loss_mask))
        return all_shares(tokens, count), all_shares(logprobs, count)
