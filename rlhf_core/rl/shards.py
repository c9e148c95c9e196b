"""Shards of one batch, sent to the ranks once for all calls that divide it alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from rlhf_core.division import Division
from rlhf_core.training.group import WorkerGroup
from rlhf_core.types import PackedBatch

B = TypeVar("B", bound=PackedBatch)


class Shards(Generic[B]):
    """The shards of a batch by reference, for ranks of any group."""

    def __init__(self, batch: B, workers: WorkerGroup[Any]) -> None:
        self.batch = batch
        self._workers = workers
        self._sent: dict[tuple[tuple[tuple[int, ...], ...], ...], Sequence[list[B]]] = {}  # by plan

    def of(self, division: Division[B]) -> Sequence[list[B]]:
        """Return the shards of a division of the batch, for `WorkerGroup.scatter`."""
        plan = tuple(tuple(map(tuple, replica)) for replica in division.plan)
        if plan not in self._sent:
            self._sent[plan] = self._workers.put(division.split())
        return self._sent[plan]
