"""Log-probs and entropy of next tokens without a (rows, vocabulary) tensor alive for all rows at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf_core.kept_tokens import NO_TOKEN
from rlhf_core.mesh import current_mesh

# Logits of one chunk: 64 MiB in float32. Blocks below 32 MiB glibc does not give back, and then everything stays.
CHUNK_ELEMENTS = 1 << 24
# Chunks of a call whose distributions wait for backward, 256 MiB; those of the others are computed again there.
KEPT_CHUNKS = 4
_NO_LOGIT = -1e30  # divided by the lowest temperature it is still a number of float32 and bfloat16


class Head(Protocol):
    """A linear layer, or another function from hidden states (M, d) to logits (M, V)."""

    def __call__(self, hidden: Tensor, /) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def chunked_logprobs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    temperature: float | Tensor = 1.0,
    kept: Tensor | None = None,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(head(hidden) / temperature)[targets], in float32, and the entropy of each distribution (nats).

    hidden: (M, d); targets: (M,) int64; both results: (M,) float32. temperature: of all rows, or (M,).
    kept: (M, k) int32, as `kept_only`: probabilities are of these tokens alone; None: of all.
    Logits are computed a chunk of rows at a time and, except for the first
    chunks, again in backward. Every rank makes the same calls of `head`, forward and backward, since each is a
    collective under ZeRO-3.
    """
    rows = {"hidden": hidden, "targets": targets}
    if kept is not None:
        rows["kept"] = kept
    if isinstance(temperature, Tensor):
        rows["temperature"] = temperature

    def chunk(*parts: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(rows, parts, strict=True))
        return _chunk(
            head, given["hidden"], given["targets"], given.get("kept"),
            temperature=given.get("temperature", temperature), with_entropy=with_entropy,
        )  # fmt: skip

    logprobs, entropy = by_chunks(chunk, [*rows.values()], [head], vocabulary, chunk_elements, kept=KEPT_CHUNKS)
    return logprobs, entropy if with_entropy else None


def by_chunks(
    function: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor],
    heads: Sequence[Head],
    vocabulary: int,
    chunk_elements: int,
    *,
    kept: int = 0,
) -> tuple[Tensor, Tensor]:
    """Apply `function` to a chunk of the rows of `tensors` at a time, and again in backward if there are several,
    except for the first `kept`.

    tensors: each (M, ...); function: of their parts (m, ...) to two tensors (m, ...), which makes logits with each of
    `heads`, (m, vocabulary). Every rank makes the same calls, forward and backward, since each is a collective under
    ZeRO-3. Returns both results for all rows.
    """
    first = tensors[0]
    chunks = _same_on_all_ranks(math.ceil(first.shape[0] * vocabulary / chunk_elements), heads, first.device)
    results: list[tuple[Tensor, Tensor]] = []
    for parts in zip(*(tensor.tensor_split(chunks) for tensor in tensors), strict=True):
        if not torch.is_grad_enabled() or chunks == 1 or len(results) < kept:
            results.append(function(*parts))
            continue
        # Under ZeRO-3 the head's weight is gathered in recomputation but already released when shapes are compared.
        result = checkpoint(function, *parts, use_reentrant=False, determinism_check="none")
        results.append(cast(tuple[Tensor, Tensor], result))
    return torch.cat([one for one, _ in results]), torch.cat([other for _, other in results])


def _chunk(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    *,
    temperature: float | Tensor,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    if kept is not None:
        logits, targets = kept_only(logits, targets, kept)
    return target_logprobs(logits, targets, temperature=temperature, with_entropy=with_entropy)


def kept_only(logits: Tensor, targets: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (M, k) of the kept tokens, and the targets' places among these.

    logits: (M, V); targets: (M,) int64, each one of its row's kept tokens; kept: (M, k) int32, filled with NO_TOKEN,
    whose logits are so low that their probability is exactly 0 and the entropy stays finite.
    """
    places = (kept == targets.unsqueeze(-1)).int().argmax(-1)
    chosen = logits.gather(-1, kept.clamp_min(0).long())
    return chosen.masked_fill(kept == NO_TOKEN, _NO_LOGIT), places


def target_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply TargetLogprobs."""
    logprobs, entropy = TargetLogprobs.apply(logits, targets, temperature, with_entropy)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def log_distribution(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return log softmax(logits / temperature) in float32, or float64 for float64 logits. temperature: of all rows, or
    (M,).
    """
    exact = logits if logits.dtype == torch.float64 else logits.float()
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(-1)
    if isinstance(temperature, Tensor) or temperature != 1:
        # In place only where `exact` is a copy: the logits themselves are the caller's.
        exact = exact / temperature if exact is logits else exact.div_(temperature)
    # Not logit - logsumexp: where logits are large, so is the rounding of that difference.
    return torch.log_softmax(exact, dim=-1)


class TargetLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[targets] and, with `with_entropy`, the entropy of each distribution, in
    float32.

    The gradient of both in one pass over the logits: softmax minus one-hot, instead of autograd's separate steps
    through `gather`, log-softmax, division and cast. logits: (M, V), of any dtype (float64 stays float64); targets:
    (M,) int64; temperature: of all rows, or (M,). Both results: (M,); without entropy the second is the first, without
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float | Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        distribution = log_distribution(logits, temperature)
        logprobs = distribution.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy = distribution.exp().mul_(distribution).sum(-1).neg_() if with_entropy else logprobs.clone()
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(distribution, targets, entropy if with_entropy else None)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """d logprob_t / d logit_j = [j = t] - p_j; d H / d logit_j = -p_j (log p_j + H); both / temperature."""
        of_logprobs, of_entropy = gradients
        distribution, targets, entropy = ctx.saved_tensors
        if of_logprobs is None and of_entropy is None:
            return None, None, None, None
        result = distribution.exp()
        if entropy is None or of_entropy is None:
            assert of_logprobs is not None
            result.mul_((of_logprobs / -ctx.temperature).unsqueeze(-1))
        else:
            of_entropy = (of_entropy / ctx.temperature).unsqueeze(-1)
            factor = torch.add(distribution, entropy.unsqueeze(-1)).mul_(of_entropy)
            if of_logprobs is not None:
                factor.add_((of_logprobs / ctx.temperature).unsqueeze(-1))
            result.mul_(factor).neg_()
            del factor
        if of_logprobs is not None:
            result.scatter_add_(-1, targets.unsqueeze(-1), (of_logprobs / ctx.temperature).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None


def _same_on_all_ranks(chunks: int, heads: Sequence[Head], device: torch.device) -> int:
    """Return the maximum number of chunks over ranks if the weight of a head is sharded; at least one."""
    chunks = max(chunks, 1)
    sharded = any(hasattr(parameter, "ds_id") for head in heads for parameter in head.parameters())
    if not sharded:
        return chunks
    return int(current_mesh().reduce(torch.tensor(chunks, device=device), dist.ReduceOp.MAX, over="all"))
