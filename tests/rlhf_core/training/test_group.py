"""The group of one rank in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from rlhf_core.training.distributed import join_group
from rlhf_core.training.group import InlineGroup, WorkerGroup


class Worker:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def add(self, a: int, b: int = 0) -> int:
        return a + b + self.offset

    def count(self, until: int) -> Iterator[int]:
        yield from range(until)


def test_one_rank_answers_as_a_list_of_one() -> None:
    group: WorkerGroup = InlineGroup(Worker, 100)
    assert group.size == 1
    assert dist.get_world_size() == 1
    assert group.call("add", 1, 2) == [103]
    assert group.scatter("add", [5], 1) == [106]
    assert list(group.stream("count", 3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="add: 2 shards for 1 rank"):
        group.scatter("add", [5, 6], 1)
    group.shutdown()


def test_a_process_cannot_be_two_ranks() -> None:
    join_group(rank=0, size=1)
    join_group(rank=0, size=1)
    with pytest.raises(RuntimeError, match="this process is rank 0 of 1 already"):
        join_group(rank=1, size=2, address="127.0.0.1:1")
