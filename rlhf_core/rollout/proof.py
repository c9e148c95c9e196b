"""Proof that engines serve the published weights: digests of every tensor, and log-probs of a fixed probe.

The trainer computes a digest of each tensor before sending it; every engine reads back the tensors that it computes
with, and computes the same digest. This is exact, and identifies the wrong tensors. For weights that can only be read
by matrix products, most publishes check random columns only. Log-probs also detect an engine that computes wrongly with
the right weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncError
from rlhf_core.rollout.digest import tensor_digest
from rlhf_core.rollout.engine import ProbeAnswer, ServedTensor
from rlhf_core.system.listing import some

SAMPLED_COLUMNS = 64  # of a weight that is expensive to read back
_NAMED = 8  # tensors that an error names; the others are counted


@dataclass(frozen=True, slots=True)
class GivenColumns:
    """Digest of a sample of the columns of a published weight.

    k of n columns are drawn for each publish: m wrong columns are missed with probability C(n-m, k) / C(n, k), at most
    (1 - m/n)^k. Stale or exchanged weights, wrong almost everywhere, are always detected; a single wrong element is
    detected in a share k/n of the publishes.
    """

    indices: Tensor
    digest: str

    @classmethod
    def of(cls, weight: Tensor, seed: int) -> GivenColumns:
        """Digest columns of `weight`, (out, in), drawn from seed and width only."""
        indices = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))[:SAMPLED_COLUMNS]
        return cls(indices, tensor_digest(weight[:, indices]))


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """Digests by which a worker of an engine recognises its share of a published tensor."""

    digest: str  # of the whole
    shard_digest: str  # of its shard, in the dtype in which it is served
    columns: GivenColumns | None = None  # of its shard


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected answer of engines that serve `version`."""

    version: int
    logprobs: Sequence[Sequence[float]]  # the trainer's, of the probe at temperature 1; the first of each is ignored
    digests: Mapping[str, str] = field(default_factory=dict)  # of each published tensor


@dataclass(frozen=True, slots=True)
class Proof:
    difference: float  # mean |log-prob difference| of the worst engine and the trainer over the probe's tokens
    max_difference: float  # of any engine, at any token
    not_read_back: tuple[str, ...]  # tensors whose layout an engine cannot read, checked by log-probs only


def default_tolerance(dtype: str) -> float:
    """Return the mean |log-prob difference| over the probe that rounding explains, with a margin for larger models.

    Measured on CPU, vLLM against our packed forward: float32 below 1e-5 (single tokens 5e-5, SmolLM2-135M); bfloat16
    0.02 to 0.06. A mean, since in bfloat16 a single unlikely token may differ much more: by 0.3 to 1.1 over 15
    publishes of one run. A stale output head (vllm.worker.repack_heads) differed by 0.5 to 4. In bfloat16 log-probs
    alone would detect stale weights late; digests, which are exact, detect them at once.
    """
    return {"float32": 1e-4, "bfloat16": 0.25}[dtype]


def verify_weights(
    answers: Sequence[ProbeAnswer],
    expected: Expected,
    tolerance: float,
    before: Expected | None = None,
) -> Proof:
    """Compare the answer of every engine with `expected`. before: the previous publish, to recognise stale values.

    Raises WeightSyncError, with version and engine, if another version is served, the mean difference is above
    `tolerance`, or tensors are not as published; it names these, with the origin of their values if known.
    """
    max_mean_difference = max_difference = 0.0
    unverifiable: set[str] = set()
    for index, answer in enumerate(answers):
        if answer.version != expected.version:
            raise WeightSyncError(
                f"engine {index} serves version {answer.version}, but version {expected.version} was published"
            )
        wrong = list(_wrong_tensors(answer, expected, before))
        differences = _differences(answer.logprobs, expected.logprobs)
        mean = float(differences.mean())
        if wrong or not mean <= tolerance:  # true for NaN, too
            tensors = some(wrong, _NAMED) if wrong else "it serves each tensor as it was published"
            raise WeightSyncError(
                f"engine {index} does not serve version {expected.version} as published: {tensors}; its "
                f"log-probs of the probe are off by {mean:.3g} on average (tolerance {tolerance:.3g})"
            )
        max_mean_difference = max(max_mean_difference, mean)
        max_difference = max(max_difference, float(differences.max()))
        unverifiable.update(tensor.name for tensor in answer.served if not tensor.read_back)
    return Proof(max_mean_difference, max_difference, tuple(sorted(unverifiable)))


def _wrong_tensors(answer: ProbeAnswer, expected: Expected, before: Expected | None) -> Iterator[str]:
    """Yield an error clause for each wrong tensor; none if no tensors were read back or published with digests."""
    if not answer.served or not expected.digests:
        return
    for tensor in answer.served:
        if tensor.digest != expected.digests.get(tensor.published):
            yield f"{_label(tensor)} {_origin(tensor, expected, before)}"
    for name in sorted(expected.digests.keys() - {tensor.published for tensor in answer.served}):
        yield f"{name} is not served at all"


def _label(tensor: ServedTensor) -> str:
    tied = "" if tensor.name == tensor.published else f" (tied to {tensor.published})"
    return f"{tensor.name}{tied}{'' if tensor.rank is None else f' on rank {tensor.rank}'}"


def _origin(tensor: ServedTensor, expected: Expected, before: Expected | None) -> str:
    if tensor.published not in expected.digests:
        return "was not published"
    if before is not None and before.digests.get(tensor.published) == tensor.digest:
        return f"still has the values of version {before.version}"
    others = [name for name, digest in expected.digests.items() if digest == tensor.digest]
    return f"has the values of {others[0]}" if others else "has other values"


def _differences(actual: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> Tensor:
    """Return |actual - expected| of each token of the probe but the first of each sequence."""
    pairs = [(a[1:], e[1:]) for a, e in zip(actual, expected, strict=True)]
    flat = [abs(x - y) for a, e in pairs for x, y in zip(a, e, strict=True)]
    return torch.tensor(flat or [0.0], dtype=torch.float64)
