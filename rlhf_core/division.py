"""The division of one step over data-parallel replicas: equal work for each, as packed micro-batches.

RL, supervised training and scoring all divide a packed batch this way. Its examples (a sequence, or a preference pair)
stay whole, those with the same prompt stay together, since a model may compute it once for all of a micro-batch
(models/token_tree.py), and results per token can be put back into the order of the batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rlhf_core.packing import LEAST_SHARED, select
from rlhf_core.types import PackedBatch

B = TypeVar("B", bound=PackedBatch)
Plan = list[list[list[int]]]  # [replica][micro-batch] -> indices of examples; an empty list stands for a filler

# An example of T tokens costs about T * (1 + T / ATTENTION_TOKENS): the linear layers, and the attention.
ATTENTION_TOKENS = 4096
# Examples of one prompt are divided where they are more than this share of a replica's work: loads stay equal.
_LARGEST_SHARE = 0.25


@dataclass(frozen=True)
class Division(Generic[B]):
    """Which examples of a batch each replica works on, micro-batch by micro-batch."""

    batch: B
    plan: Plan  # all replicas have the same number of micro-batches

    @classmethod
    def of(cls, batch: B, *, replicas: int, tokens_per_micro_batch: int) -> Division[B]:
        plan = plan_micro_batches(
            batch.example_lengths.tolist(), replicas=replicas, tokens_per_micro_batch=tokens_per_micro_batch,
            prompts=_prompts(batch),
        )  # fmt: skip
        return cls(batch, plan)

    def over(self, replicas: int) -> Division[B]:
        """The same micro-batches over another number of replicas: a model computes the same to the bit, whoever runs
        it."""
        if replicas == len(self.plan):
            return self
        micro_batches = [part for replica in self.plan for part in replica if part]
        shares = [micro_batches[replica::replicas] for replica in range(replicas)]
        most = max(1, *(len(share) for share in shares))
        return Division(self.batch, [share + [[] for _ in range(most - len(share))] for share in shares])

    def split(self) -> list[list[B]]:
        """[replica][micro-batch] -> that part of the batch."""
        return [[select(self.batch, part) if part else filler(self.batch) for part in replica] for replica in self.plan]

    def join(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """The inverse of `split` for results: [replica][micro-batch] tensors of (n,) tokens -> (N,), in batch order."""
        pieces: dict[int, Tensor] = {}
        lengths = self.batch.example_lengths.tolist()
        for replica_plan, replica_parts in zip(self.plan, parts, strict=True):
            for examples, values in zip(replica_plan, replica_parts, strict=True):
                if examples:
                    pieces.update(zip(examples, values.split([lengths[i] for i in examples]), strict=True))
        return torch.cat([pieces[i] for i in range(len(lengths))])


def filler(batch: B) -> B:
    """The shortest example of `batch`, of which no token is trained.

    A replica without work of its own runs it, so that all ranks make the same collective calls.
    """
    lengths = batch.example_lengths.tolist()
    shortest = select(batch, [lengths.index(min(lengths))])
    return replace(shortest, loss_mask=torch.zeros_like(shortest.loss_mask))


def _prompts(batch: PackedBatch) -> list[Hashable]:
    """Of each example, what its first sequence has before the first token that is trained, if that is worth sharing."""
    starts = (batch.example_lengths.cumsum(0) - batch.example_lengths).tolist()
    lengths = batch.sequence_lengths.tolist()[:: batch.sequences_per_example]
    ids, trained = batch.input_ids.tolist(), batch.loss_mask.tolist()
    prompts: list[Hashable] = []
    for example, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        end = next((i for i in range(start, start + length) if trained[i]), start + length)
        prompts.append(tuple(ids[start:end]) if end - start >= LEAST_SHARED else example)
    return prompts


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    replicas: int,
    tokens_per_micro_batch: int,
    prompts: Sequence[Hashable] | None = None,
) -> Plan:
    """Assign examples of these lengths, in tokens, to replicas and micro-batches.

    Cost counts tokens and, for attention, their square; replicas get as equal cost as greedy assignment finds. All
    replicas have the same number of micro-batches. A micro-batch holds at most `tokens_per_micro_batch` tokens unless a
    single example is longer. Examples of similar length share a micro-batch. prompts: of each example; those of one
    stay together if they are no large part of a replica's work. None: each has its own.
    """
    if replicas < 1:
        raise ValueError(f"plan_micro_batches: {replicas} replicas")
    costs = [length * (1 + length / ATTENTION_TOKENS) for length in lengths]
    together = range(len(lengths)) if prompts is None else prompts
    units = _units(together, lengths, costs, tokens_per_micro_batch, _LARGEST_SHARE * sum(costs) / replicas)
    loads = _balance([sum(costs[i] for i in unit) for unit in units], replicas)
    plan = [_fill([units[i] for i in load], lengths, tokens_per_micro_batch) for load in loads]
    most = max(1, *(len(micro_batches) for micro_batches in plan))
    return [micro_batches + [[] for _ in range(most - len(micro_batches))] for micro_batches in plan]


def _balance(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """Longest job first onto the least loaded replica (Graham, 1969)."""
    loads = [(0.0, replica) for replica in range(replicas)]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, replica = heapq.heappop(loads)
        shares[replica].append(index)
        heapq.heappush(loads, (load + costs[index], replica))
    return shares


def _units(
    prompts: Iterable[Hashable], lengths: Sequence[int], costs: Sequence[float], tokens: int, cost: float
) -> list[list[int]]:
    """Examples that stay together, the longest first: of one prompt, within `tokens` and `cost` if they are several."""
    units: list[list[int]] = []
    of_prompt: dict[Hashable, int] = {}
    sizes: list[tuple[int, float]] = []
    for index, prompt in sorted(enumerate(prompts), key=lambda item: (-costs[item[0]], item[0])):
        unit = of_prompt.get(prompt)
        if unit is None or sizes[unit][0] + lengths[index] > tokens or sizes[unit][1] + costs[index] > cost:
            unit = of_prompt[prompt] = len(units)
            units.append([])
            sizes.append((0, 0.0))
        units[unit].append(index)
        sizes[unit] = (sizes[unit][0] + lengths[index], sizes[unit][1] + costs[index])
    return units


def _fill(share: Sequence[Sequence[int]], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Micro-batches of units whose longest examples are neighbours in length, each within the limit."""
    micro_batches: list[list[int]] = []
    tokens = 0
    for unit in sorted(share, key=lambda unit: (-lengths[unit[0]], unit[0])):
        size = sum(lengths[index] for index in unit)
        if not micro_batches or tokens + size > limit:
            micro_batches.append([])
            tokens = 0
        micro_batches[-1] += unit
        tokens += size
    return micro_batches
