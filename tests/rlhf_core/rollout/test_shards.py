"""Shards of tensors, and what the workers of an engine answer together."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.errors import WeightSyncError
from rlhf_core.rollout.engine import ServedTensor
from rlhf_core.rollout.shards import ServedShard, Shard, joined

pytestmark = pytest.mark.parts

WHOLE, LOWER, UPPER = Shard.whole(6), Shard(0, 6, ((0, 3),)), Shard(0, 6, ((3, 6),))


def served(shard: Shard, digest: str = "new", *, read_back: bool = True) -> ServedShard:
    return ServedShard(ServedTensor("head", "embedding", digest, read_back), shard)


def test_the_shard_of_a_tensor_that_is_fused_from_two() -> None:
    tensor = torch.arange(24).view(6, 4)
    assert Shard(0, 6, ((1, 2), (4, 6))).of(tensor)[:, 0].tolist() == [4, 16, 20]
    assert Shard(1, 4, ((2, 4),)).of(tensor)[0].tolist() == [2, 3]
    assert Shard(0, 6, ((1, 2), (4, 6))).length == 3


def test_shards_that_are_as_published_are_one_tensor() -> None:
    assert joined([[served(LOWER)], [served(UPPER)]]) == (ServedTensor("head", "embedding", "new"),)
    assert joined([[served(WHOLE)], [served(WHOLE)]]) == (ServedTensor("head", "embedding", "new"),)


def test_workers_that_serve_different_values_are_named() -> None:
    assert joined([[served(LOWER)], [served(UPPER, "old")]]) == (
        ServedTensor("head", "embedding", "new", rank=0),
        ServedTensor("head", "embedding", "old", rank=1),
    )


def test_the_stage_that_has_a_tensor_answers_for_it() -> None:
    assert joined([[served(WHOLE, "old")], [served(Shard.whole(1), read_back=False)]]) == (
        ServedTensor("head", "embedding", "old"),
    )


def test_a_part_that_no_worker_serves() -> None:
    with pytest.raises(WeightSyncError, match="no worker of the engine serves head from index 3 of axis 0 on"):
        joined([[served(LOWER)], [served(LOWER)]])
