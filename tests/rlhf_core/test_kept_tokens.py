"""Kept tokens: stored without padding, and dense where a model reads them."""

from __future__ import annotations

import pickle

import torch

from rlhf_core.kept_tokens import KeptTokens
from rlhf_core.types import PackedBatch

KEPT = KeptTokens.joined([KeptTokens.nowhere(1), KeptTokens.of([[5, 7, 9], [3], [8, 2]])])
DENSE = torch.tensor([[-1, -1, -1], [5, 7, 9], [3, -1, -1], [8, 2, -1]], dtype=torch.int32)


def test_rows_are_filled_behind_their_tokens() -> None:
    assert torch.equal(KEPT.dense(), DENSE)
    assert KeptTokens.nowhere(2).dense().shape == (2, 0)


def test_the_first_and_the_others_are_the_whole() -> None:
    for count in range(5):
        assert KeptTokens.joined([KEPT.first(count), KEPT.after(count)]) == KEPT
    assert torch.equal(KEPT.first(2).dense(), DENSE[:2])
    assert torch.equal(KEPT.after(2).dense(), DENSE[2:, :2])


def test_a_batch_travels_without_what_fills_the_rows() -> None:
    batch = PackedBatch(torch.arange(4), torch.tensor([4]), torch.tensor([False, True, True, True]), kept_tokens=DENSE)
    state = batch.__getstate__()["kept_tokens"]
    assert [part.tolist() for part in state] == [[0, 3, 1, 2], [5, 7, 9, 3, 8, 2]]
    again = pickle.loads(pickle.dumps(batch, protocol=5))
    assert again.kept_tokens is not None
    assert torch.equal(again.kept_tokens, DENSE)
    assert again.kept_tokens.dtype == torch.int32
