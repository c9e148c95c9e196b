from __future__ import annotations

import torch

from rlhf_core.losses.masking import masked_sum, weighted_sum
from rlhf_core.types import sequence_ids

MASK = torch.tensor([True, False, True, False])


def test_a_sum_reads_only_trained_tokens() -> None:
    values = torch.tensor([1.0, float("nan"), 4.0, float("inf")])
    assert masked_sum(values, MASK).item() == 5.0


def test_a_weighted_sum_reads_neither_values_nor_weights_elsewhere() -> None:
    values = torch.tensor([1.0, float("nan"), 4.0, 0.0])
    assert weighted_sum(values, torch.tensor([2.0, 0.0, 0.5, float("inf")]), MASK).item() == 4.0


def test_sequence_ids() -> None:
    assert sequence_ids(torch.tensor([2, 1, 3])).tolist() == [0, 0, 1, 2, 2, 2]


def test_a_token_that_is_not_trained_has_no_gradient() -> None:
    values = torch.tensor([1.0, float("nan"), 4.0, float("inf")], requires_grad=True)
    masked_sum(values, MASK).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_an_empty_sum_is_zero() -> None:
    assert masked_sum(torch.ones(4), torch.zeros(4, dtype=torch.bool)).item() == 0.0
