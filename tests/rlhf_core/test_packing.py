"""Packing keeps every token with its fields; plans give every rank as much to do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.packing import ATTENTION_TOKENS, concatenate, filler, pack, plan_micro_batches, select
from rlhf_core.types import Experience, PackedBatch, PreferenceBatch


def experience() -> Experience:
    packed = pack([[5, 6, 7], [8], [9, 4]], [[False, True, True], [True], [False, True]])
    return Experience(
        **{name: getattr(packed, name) for name in ("input_ids", "position_ids", "sequence_lengths", "loss_mask")},
        sequence_indices=torch.tensor([30, 10, 20]),
        rollout_logprobs=torch.arange(6.0),
    )


def test_pack_lays_sequences_end_to_end() -> None:
    batch = experience()
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.sequence_lengths.tolist() == [3, 1, 2]
    assert batch.loss_mask.tolist() == [False, True, True, True, False, True]
    assert batch.num_trained_tokens == 4


@pytest.mark.parametrize(("ids", "masks"), [([], []), ([[1]], []), ([[]], [[]]), ([[1, 2]], [[True]])])
def test_pack_refuses_what_does_not_fit(ids: list[list[int]], masks: list[list[bool]]) -> None:
    with pytest.raises(ValueError, match=r"^pack: "):
        pack(ids, masks)


def test_select_slices_tokens_and_sequences_and_leaves_absent_fields_absent() -> None:
    part = select(experience(), [2, 0])
    assert isinstance(part, Experience)
    assert part.input_ids.tolist() == [9, 4, 5, 6, 7]
    assert part.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert part.sequence_lengths.tolist() == [2, 3]
    assert part.sequence_indices is not None
    assert part.sequence_indices.tolist() == [20, 30]
    assert part.rollout_logprobs is not None
    assert part.rollout_logprobs.tolist() == [4, 5, 0, 1, 2]
    assert part.values is None


def test_select_tells_tokens_from_sequences_when_there_are_as_many() -> None:
    batch = replace(select(experience(), [1]), sequence_indices=torch.tensor([10]))
    assert select(batch, [0]).rollout_logprobs.tolist() == [3]


def preferences() -> PreferenceBatch:
    packed = pack([[1, 2], [1, 3, 4], [5], [6]], [[True] * n for n in (2, 3, 1, 1)])
    return PreferenceBatch(**vars(packed), margins=torch.tensor([0.5, 1.5]))


def test_select_takes_whole_pairs_with_their_margin() -> None:
    part = select(preferences(), [2, 3])
    assert part.input_ids.tolist() == [5, 6]
    assert part.margins is not None
    assert part.margins.tolist() == [1.5]
    with pytest.raises(ValueError, match="not whole pairs"):
        select(preferences(), [1, 2])


def test_concatenate_is_the_inverse_of_select() -> None:
    batch = experience()
    joined = concatenate([select(batch, [0]), select(batch, [1, 2])])
    for name, value in vars(batch).items():
        assert value is None if getattr(joined, name) is None else torch.equal(getattr(joined, name), value)
    with pytest.raises(ValueError, match="some batches have `values` and some have not"):
        concatenate([batch, replace(batch, values=torch.zeros(6))])


def test_a_filler_is_short_and_trains_nothing() -> None:
    assert filler(experience()).input_ids.tolist() == [8]
    assert filler(experience()).num_trained_tokens == 0
    pair = filler(preferences())
    assert pair.num_sequences == 2
    assert pair.margins is not None
    assert pair.margins.tolist() == [0.5]
    assert filler(replace(preferences(), margins=None)).num_sequences == 2


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 500), max_size=40).map(lambda found: found[: len(found) // 2 * 2]),
    ranks=st.integers(1, 5),
    limit=st.integers(1, 2000),
    unit=st.sampled_from([1, 2]),
)
def test_a_plan_holds_every_sequence_once_within_the_limit(
    lengths: list[int], ranks: int, limit: int, unit: int
) -> None:
    plan = plan_micro_batches(lengths, ranks=ranks, tokens_per_micro_batch=limit, unit=unit)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    flat = [i for rank in plan for micro_batch in rank for i in micro_batch]
    assert sorted(flat) == list(range(len(lengths)))
    for rank in plan:
        for micro_batch in rank:
            assert sum(lengths[i] for i in micro_batch) <= limit or len(micro_batch) == unit
            assert all(micro_batch[k] + 1 == micro_batch[k + 1] for k in range(0, len(micro_batch), 2) if unit == 2)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 300), st.integers(1, 20_000)), min_size=1, max_size=60),
    ranks=st.integers(1, 8),
    limit=st.integers(1, 40_000),
)
def test_no_rank_has_much_more_to_do_than_its_share(lengths: list[int], ranks: int, limit: int) -> None:
    """Graham (1969): the mean, and what one sequence more than that can cost; the square of its length counts."""
    costs = [length * (1 + length / ATTENTION_TOKENS) for length in lengths]
    plan = plan_micro_batches(lengths, ranks=ranks, tokens_per_micro_batch=limit)
    loads = [sum(costs[i] for micro_batch in rank for i in micro_batch) for rank in plan]
    assert sum(loads) == pytest.approx(sum(costs))
    longest = sorted(costs, reverse=True)[: ranks + 1]
    assert max(loads) <= sum(costs) / ranks + (1 - 1 / ranks) * longest[0] + 1e-6
    if len(longest) <= ranks:
        assert max(loads) == longest[0]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40), limit=st.integers(1, 2000))
def test_micro_batches_are_as_full_as_they_can_be(lengths: list[int], limit: int) -> None:
    """No sequence would have fitted into the micro-batch before its own; lengths in a micro-batch are neighbours."""
    (micro_batches,) = plan_micro_batches(lengths, ranks=1, tokens_per_micro_batch=limit)
    for one, other in pairwise(micro_batches):
        assert sum(lengths[i] for i in one) + lengths[other[0]] > limit
        assert min(lengths[i] for i in one) >= max(lengths[i] for i in other)


def test_ranks_get_equal_cost_not_equal_counts() -> None:
    plan = plan_micro_batches([8000, 500, 500, 500, 500], ranks=2, tokens_per_micro_batch=100_000)
    assert plan == [[[0]], [[1, 2, 3, 4]]]


def test_the_square_of_the_length_counts() -> None:
    # Two halves have the tokens of one whole, but not its attention.
    long, half = 2 * ATTENTION_TOKENS, ATTENTION_TOKENS
    plan = plan_micro_batches([long, half, half, half], ranks=2, tokens_per_micro_batch=1 << 20)
    assert plan == [[[0]], [[1, 2, 3]]]


def test_a_rank_without_sequences_gets_fillers() -> None:
    assert plan_micro_batches([5], ranks=2, tokens_per_micro_batch=10) == [[[0]], [[]]]


def test_a_plan_is_the_same_every_time() -> None:
    lengths = [7] * 9 + [3] * 4
    plans = {str(plan_micro_batches(lengths, ranks=3, tokens_per_micro_batch=14)) for _ in range(5)}
    assert len(plans) == 1


def test_pairs_must_come_in_twos() -> None:
    with pytest.raises(ValueError, match="3 sequences in units of 2"):
        plan_micro_batches([1, 2, 3], ranks=1, tokens_per_micro_batch=10, unit=2)


def test_selected_parts_of_a_plan_are_plain_batches() -> None:
    batch: PackedBatch = pack([[1, 2], [3]], [[True, True], [True]])
    assert type(select(batch, [1])) is PackedBatch
