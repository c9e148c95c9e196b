"""Division of one step over data-parallel replicas: equal work for each, as packed micro-batches.

RL, supervised training and scoring all divide a packed batch this way. Its examples (a sequence, or a preference pair)
stay whole, those with the same prompt stay together, since a model may compute it once for all of a micro-batch
(models/token_tree.py), and results per token can be put back into the order of the batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.packing import LEAST_SHARED, select, select_each
from rlhf_core.types import PackedBatch

B = TypeVar("B", bound=PackedBatch)
Plan = list[list[list[int]]]  # [replica][micro-batch] -> indices of examples; an empty list stands for a filler

# An example of T tokens costs about T * (1 + T / ATTENTION_TOKENS): the linear layers, and the attention.
ATTENTION_TOKENS = 4096
# Examples of one prompt are divided where they are more than this share of a replica's work: loads stay equal.
_LARGEST_SHARE = 0.25


@dataclass(frozen=True)
class Division(Generic[B]):
    """Examples of a batch by replica and micro-batch."""

    batch: B
    plan: Plan  # all replicas have the same number of micro-batches

    @classmethod
    def of(cls, batch: B, *, replicas: int, tokens_per_micro_batch: int, shares_prompts: bool = False) -> Division[B]:
        """Divide a batch. shares_prompts: the model computes a prompt once for all examples of a micro-batch."""
        prompts, lengths = _prompts(batch), batch.example_lengths.tolist()
        again = [0] * len(lengths)
        if shares_prompts:
            again = [prompt.length for prompt in prompts]
            within = batch.sequences_per_example - 1
            lengths = [length - within * prompt.length for length, prompt in zip(lengths, prompts, strict=True)]
        plan = plan_micro_batches(
            lengths, replicas=replicas, tokens_per_micro_batch=tokens_per_micro_batch,
            prompts=[prompt.key for prompt in prompts], again=again,
        )  # fmt: skip
        return cls(batch, plan)

    def over(self, replicas: int) -> Division[B]:
        """Return the same micro-batches over another number of replicas; the results are equal to the bit."""
        if replicas == len(self.plan):
            return self
        micro_batches = [part for replica in self.plan for part in replica if part]
        shares = [micro_batches[replica::replicas] for replica in range(replicas)]
        most = max(1, *(len(share) for share in shares))
        return Division(self.batch, [share + [[] for _ in range(most - len(share))] for share in shares])

    def split(self) -> list[list[B]]:
        """Return the parts of the batch by [replica][micro-batch]."""
        selected = iter(select_each(self.batch, [part for replica in self.plan for part in replica if part]))
        shortest = filler(self.batch)
        return [[next(selected) if part else shortest for part in replica] for replica in self.plan]

    def join(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Invert `split` for results: [replica][micro-batch] tensors of (n,) tokens -> (N,), in batch order."""
        pieces: dict[int, Tensor] = {}
        lengths = self.batch.example_lengths.tolist()
        for replica_plan, replica_parts in zip(self.plan, parts, strict=True):
            for examples, values in zip(replica_plan, replica_parts, strict=True):
                if examples:
                    pieces.update(zip(examples, values.split([lengths[i] for i in examples]), strict=True))
        return torch.cat([pieces[i] for i in range(len(lengths))])


def filler(batch: B) -> B:
    """Return the shortest example of `batch`, with none of its tokens trained.

    A replica without work of its own runs it, so that all ranks make the same collective calls.
    """
    lengths = batch.example_lengths.tolist()
    shortest = select(batch, [lengths.index(min(lengths))])
    return replace(shortest, loss_mask=torch.zeros_like(shortest.loss_mask))


@dataclass(frozen=True, slots=True)
class _Prompt:
    key: Hashable  # equal for equal prompts
    length: int  # tokens; 0 if that is not worth sharing


def _prompts(batch: PackedBatch) -> list[_Prompt]:
    """Return the prompt of each example: the common prefix of its sequences before the first trained token."""
    ends = batch.sequence_lengths.cumsum(0).tolist()
    bounds = list(pairwise([0, *ends]))
    ids, trained = batch.input_ids.numpy(), batch.loss_mask.numpy()
    prompts: list[_Prompt] = []
    for first in range(0, len(bounds), batch.sequences_per_example):
        own, *others = (ids[start:end] for start, end in bounds[first : first + batch.sequences_per_example])
        length = _before_the_first(trained[slice(*bounds[first])])
        for other in others:
            length = min(length, len(other))
            length = _before_the_first(own[:length] != other[:length])
        is_shared = length >= LEAST_SHARED
        prompts.append(_Prompt(own[:length].tobytes(), length) if is_shared else _Prompt(first, 0))
    return prompts


def _before_the_first(flags: NDArray[np.bool_]) -> int:
    """Return how many entries of `flags` precede the first true one; all if none is."""
    return int(flags.argmax()) if flags.any() else len(flags)


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    replicas: int,
    tokens_per_micro_batch: int,
    prompts: Sequence[Hashable] | None = None,
    again: Sequence[int] | None = None,
) -> Plan:
    """Assign examples of these lengths, in tokens, to replicas and micro-batches.

    Cost counts tokens and, for attention, their square; greedy assignment balances the cost of replicas. All
    replicas have the same number of micro-batches. A micro-batch holds at most `tokens_per_micro_batch` tokens unless a
    single example is longer. Examples of similar length share a micro-batch. prompts: one per example; examples of one
    stay together if they are no large part of a replica's work. None: all differ. again: per example, the number of its
    tokens that are not computed again if an example of the same prompt is in the micro-batch; none: 0.
    """
    if replicas < 1:
        raise ValueError(f"plan_micro_batches: {replicas} replicas")
    together = range(len(lengths)) if prompts is None else prompts
    saved = [0] * len(lengths) if again is None else again
    units = _units(together, lengths, saved, tokens_per_micro_batch, replicas)
    loads = _balance([unit.cost for unit in units], replicas)
    plan = [_fill([units[i] for i in load], tokens_per_micro_batch) for load in loads]
    most = max(1, *(len(micro_batches) for micro_batches in plan))
    return [micro_batches + [[] for _ in range(most - len(micro_batches))] for micro_batches in plan]


def _balance(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """Assign the longest job first to the least loaded replica (Graham, 1969)."""
    loads = [(0.0, replica) for replica in range(replicas)]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, replica = heapq.heappop(loads)
        shares[replica].append(index)
        heapq.heappush(loads, (load + costs[index], replica))
    return shares


@dataclass(slots=True)
class _Unit:
    """Examples that stay together, the longest first."""

    longest: int  # tokens
    examples: list[int] = field(default_factory=list)
    tokens: int = 0
    cost: float = 0.0


def _cost(tokens: float) -> float:
    return tokens * (1 + tokens / ATTENTION_TOKENS)


def _units(
    prompts: Sequence[Hashable], lengths: Sequence[int], again: Sequence[int], limit: int, replicas: int
) -> list[_Unit]:
    """Group examples of one prompt, if several fit within `limit` tokens and are no large part of a replica's work."""
    added = [_cost(length) - _cost(saved) for length, saved in zip(lengths, again, strict=True)]
    once = dict(zip(prompts, again, strict=True))  # of each prompt
    most = _LARGEST_SHARE * (sum(added) + sum(map(_cost, once.values()))) / replicas
    units: list[_Unit] = []
    of_prompt: dict[Hashable, _Unit] = {}
    for index, prompt in sorted(enumerate(prompts), key=lambda item: (-lengths[item[0]], item[0])):
        unit, new = of_prompt.get(prompt), lengths[index] - again[index]
        if unit is None or unit.tokens + new > limit or unit.cost + added[index] > most:
            unit = of_prompt[prompt] = _Unit(lengths[index], tokens=again[index], cost=_cost(again[index]))
            units.append(unit)
        unit.examples.append(index)
        unit.tokens += new
        unit.cost += added[index]
    return units


def _fill(share: Iterable[_Unit], limit: int) -> list[list[int]]:
    """Form micro-batches within the limit, of units whose longest examples are neighbours in length."""
    micro_batches: list[list[int]] = []
    tokens = 0
    for unit in sorted(share, key=lambda unit: (-unit.longest, unit.examples[0])):
        if not micro_batches or tokens + unit.tokens > limit:
            micro_batches.append([])
            tokens = 0
        micro_batches[-1] += unit.examples
        tokens += unit.tokens
    return micro_batches
