"""The proof that engines serve what was published: digests of every tensor, and log-probs of a fixed probe.

The trainer takes a digest of each tensor before it leaves; every engine reads back what it computes with and takes the
same digest. That is exact, and names tensors. Where a weight can only be read by products, in most publishes random
columns stand for it. Log-probs are the other half: they would also be off where an engine computes with the right
weights in a wrong way.
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

SAMPLED_COLUMNS = 64  # of a weight that is some work to read back
_NAMED = 8  # tensors that an error names; of the others it gives the number


@dataclass(frozen=True, slots=True)
class GivenMatrix:
    """A weight as a publish gave it, and what a few of its columns must be read back as.

    k of n columns, drawn for each publish: that m columns are wrong is missed with probability C(n-m, k) / C(n, k), at
    most (1 - m/n)^k. So old or exchanged weights, wrong almost everywhere, are always found, a single element in a
    share k/n of the publishes.
    """

    digest: str  # of the whole
    columns: Tensor  # their indices
    columns_digest: str

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype, seed: int) -> GivenMatrix:
        """weight: (out, in). The columns depend on seed and width alone. dtype: that the weight is served in."""
        columns = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))[:SAMPLED_COLUMNS]
        return cls(tensor_digest(weight), columns, tensor_digest(weight[:, columns].to(dtype)))


@dataclass(frozen=True, slots=True)
class Expected:
    """What every engine must answer once it serves `version`."""

    version: int
    logprobs: Sequence[Sequence[float]]  # the trainer's, of the probe at temperature 1; the first of each says nothing
    digests: Mapping[str, str] = field(default_factory=dict)  # of each published tensor


@dataclass(frozen=True, slots=True)
class Proof:
    difference: float  # mean |log-prob difference| of the worst engine and the trainer over the probe's tokens
    max_difference: float  # of any engine, at any token
    not_read_back: tuple[str, ...]  # tensors whose layout an engine cannot read: of these, only log-probs tell


def default_tolerance(dtype: str) -> float:
    """The mean |log-prob difference| over the probe that rounding explains, with room for larger models.

    Measured on CPU, vLLM against our packed forward: float32 below 1e-5 (single tokens 5e-5, SmolLM2-135M); bfloat16
    0.02 to 0.06. A mean, since in bfloat16 a token that neither side thinks likely may be off by much more alone: by
    0.3 to 1.1 over 15 publishes of one run. The head's trap (vllm_worker) was off by 0.5 to 4. So in bfloat16 log-probs
    alone would see old weights late: there the digests, which are exact, see them at once.
    """
    return {"float32": 1e-4, "bfloat16": 0.25}[dtype]


def verify_weights(
    answers: Sequence[ProbeAnswer],
    expected: Expected,
    tolerance: float,
    before: Expected | None = None,
) -> Proof:
    """answers: of every engine, to the probe. before: what was published last, to recognise old values.

    Raises WeightSyncError naming version and engine if the mean difference is above `tolerance`, or for every tensor
    that is not as published, with where its values come from if that is known.
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
        if wrong or not mean <= tolerance:  # nor is NaN
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
    """A clause for each. An engine that says nothing at all, and a publish without digests, are left to log-probs."""
    if not answer.served or not expected.digests:
        return
    for tensor in answer.served:
        if tensor.digest != expected.digests.get(tensor.published):
            yield f"{_label(tensor)} {_origin(tensor, expected, before)}"
    for name in sorted(expected.digests.keys() - {tensor.published for tensor in answer.served}):
        yield f"{name} is not served at all"


def _label(tensor: ServedTensor) -> str:
    return tensor.name if tensor.name == tensor.published else f"{tensor.name} (tied to {tensor.published})"


def _origin(tensor: ServedTensor, expected: Expected, before: Expected | None) -> str:
    if tensor.published not in expected.digests:
        return "was not published"
    if before is not None and before.digests.get(tensor.published) == tensor.digest:
        return f"still has the values of version {before.version}"
    others = [name for name, digest in expected.digests.items() if digest == tensor.digest]
    return f"has the values of {others[0]}" if others else "has other values"


def _differences(actual: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> Tensor:
    """|Difference| at each token of the probe but the first of each sequence."""
    pairs = [(a[1:], e[1:]) for a, e in zip(actual, expected, strict=True)]
    flat = [abs(x - y) for a, e in pairs for x, y in zip(a, e, strict=True)]
    return torch.tensor(flat or [0.0], dtype=torch.float64)
