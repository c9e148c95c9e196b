"""Calls that divide a batch alike send it once."""

from __future__ import annotations

import pytest

from rlhf_core.division import Division
from rlhf_core.packing import pack
from rlhf_core.rl.shards import Shards
from rlhf_core.training.group import InlineGroup

pytestmark = pytest.mark.parts


def test_equal_divisions_are_sent_once_and_others_for_themselves() -> None:
    batch = pack([[1, 2], [3], [4, 5, 6]], [[False, True], [True], [False, True, True]])
    shards = Shards(batch, InlineGroup(object))
    first, again, other = (Division.of(batch, replicas=1, tokens_per_micro_batch=tokens) for tokens in (3, 3, 6))
    assert shards.of(first) is shards.of(again)
    assert [[part.input_ids.tolist() for part in shard] for shard in shards.of(first)] == [[[4, 5, 6], [1, 2, 3]]]
    assert [[part.num_tokens for part in shard] for shard in shards.of(other)] == [[6]]
