"""A division gives every replica equal work, keeps examples whole, and puts results back in order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.division import ATTENTION_TOKENS, Division, filler, plan_micro_batches
from rlhf_core.packing import pack
from rlhf_core.types import PackedBatch, PreferenceBatch


def batch_of(lengths: list[int], kind: type[PackedBatch] = PackedBatch) -> PackedBatch:
    packed = pack([[i] * length for i, length in enumerate(lengths)], [[True] * length for length in lengths])
    return kind(**vars(packed))


def test_a_filler_is_the_shortest_example_and_trains_nothing() -> None:
    assert filler(batch_of([3, 1, 2])).input_ids.tolist() == [1]
    assert filler(batch_of([3, 1, 2])).num_trained_tokens == 0
    pairs = PreferenceBatch(**vars(batch_of([1, 4, 2, 2])), margins=torch.tensor([0.5, 1.5]))
    pair = filler(pairs)
    assert pair.input_ids.tolist() == [2, 2, 3, 3]
    assert pair.margins is not None
    assert pair.margins.tolist() == [1.5]
    assert filler(replace(pairs, margins=None)).num_sequences == 2


KINDS = pytest.mark.parametrize("kind", [PackedBatch, PreferenceBatch])


@KINDS
@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=2, max_size=40).map(lambda drawn: drawn[: len(drawn) // 2 * 2]),
    replicas=st.integers(1, 5),
    limit=st.integers(1, 200),
)
def test_every_example_is_in_one_micro_batch_and_join_is_the_inverse(
    kind: type[PackedBatch], lengths: list[int], replicas: int, limit: int
) -> None:
    batch = batch_of(lengths, kind)
    division = Division.of(batch, replicas=replicas, tokens_per_micro_batch=limit)
    parts = division.split()
    assert len(parts) == replicas
    assert len({len(replica) for replica in parts}) == 1
    trained = [part for replica in parts for part in replica if part.num_trained_tokens]
    assert sum(part.num_examples for part in trained) == batch.num_examples
    for part in trained:
        assert part.num_tokens <= limit or part.num_examples == 1
        if kind is PreferenceBatch:
            firsts = part.input_ids[part.position_ids == 0].view(-1, 2)
            assert (firsts[:, 0] % 2 == 0).all()
            assert (firsts[:, 1] == firsts[:, 0] + 1).all()
    results = [[part.input_ids * 10.0 + part.position_ids for part in replica] for replica in parts]
    assert torch.equal(division.join(results), batch.input_ids * 10.0 + batch.position_ids)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), max_size=40), replicas=st.integers(1, 5), limit=st.integers(1, 2000))
def test_a_plan_holds_every_example_once_within_the_limit(lengths: list[int], replicas: int, limit: int) -> None:
    plan = plan_micro_batches(lengths, replicas=replicas, tokens_per_micro_batch=limit)
    assert len(plan) == replicas
    assert len({len(replica) for replica in plan}) == 1
    assert len(plan[0]) >= 1
    micro_batches = [micro_batch for replica in plan for micro_batch in replica]
    assert sorted(i for micro_batch in micro_batches for i in micro_batch) == list(range(len(lengths)))
    for micro_batch in micro_batches:
        assert sum(lengths[i] for i in micro_batch) <= limit or len(micro_batch) == 1


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 300), st.integers(1, 20_000)), min_size=1, max_size=60),
    replicas=st.integers(1, 8),
    limit=st.integers(1, 40_000),
)
def test_no_replica_has_much_more_to_do_than_its_share(lengths: list[int], replicas: int, limit: int) -> None:
    """Graham (1969): the mean, and what one example more than that can cost; the square of its length counts."""
    costs = [length * (1 + length / ATTENTION_TOKENS) for length in lengths]
    plan = plan_micro_batches(lengths, replicas=replicas, tokens_per_micro_batch=limit)
    loads = [sum(costs[i] for micro_batch in replica for i in micro_batch) for replica in plan]
    assert sum(loads) == pytest.approx(sum(costs))
    longest = sorted(costs, reverse=True)[: replicas + 1]
    assert max(loads) <= sum(costs) / replicas + (1 - 1 / replicas) * longest[0] + 1e-6
    if len(longest) <= replicas:
        assert max(loads) == longest[0]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40), limit=st.integers(1, 2000))
def test_micro_batches_are_as_full_as_they_can_be(lengths: list[int], limit: int) -> None:
    """No example would have fitted into the micro-batch before its own; lengths in a micro-batch are neighbours."""
    (micro_batches,) = plan_micro_batches(lengths, replicas=1, tokens_per_micro_batch=limit)
    for one, other in pairwise(micro_batches):
        assert sum(lengths[i] for i in one) + lengths[other[0]] > limit
        assert min(lengths[i] for i in one) >= max(lengths[i] for i in other)


def test_examples_of_one_prompt_are_in_one_micro_batch() -> None:
    lengths, prompts = [9, 5, 8, 4, 7, 6], ["a", "b", "a", "b", "a", "b"]
    plan = plan_micro_batches(lengths * 4, replicas=1, tokens_per_micro_batch=24, prompts=[
        f"{prompt}{copy}" for copy in range(4) for prompt in prompts
    ])  # fmt: skip
    assert plan[0][0] == [0, 2, 4]
    assert all(len({index // 6 for index in part}) == 1 and len(part) == 3 for part in plan[0])


def test_examples_of_one_prompt_are_on_one_replica() -> None:
    """The prompt is what comes before the first trained token. 4 examples of each of 16, all mixed."""
    sequences = [[prompt] * 8 + [9] * (1 + (7 * number) % 16) for number in range(4) for prompt in range(16)]
    batch = pack(sequences, [[i >= 8 for i in range(len(sequence))] for sequence in sequences])
    parts = Division.of(batch, replicas=2, tokens_per_micro_batch=10**6).split()
    one, other = ([int(ids[0]) for part in replica for ids in part.input_ids.split(part.sequence_lengths.tolist())]
                  for replica in parts)  # fmt: skip
    assert len(one) + len(other) == 64
    assert set(one).isdisjoint(other)
    # Prompts too short to be worth it do not keep their examples together.
    short = pack(sequences, [[i >= 7 for i in range(len(sequence))] for sequence in sequences])
    plan = plan_micro_batches(short.example_lengths.tolist(), replicas=2, tokens_per_micro_batch=10**6)
    assert Division.of(short, replicas=2, tokens_per_micro_batch=10**6).plan == plan


@settings(max_examples=200, deadline=None)
@given(
    examples=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 6)), min_size=1, max_size=60),
    replicas=st.integers(1, 8),
    limit=st.integers(1, 4000),
)
def test_prompts_cost_little_of_the_balance(examples: list[tuple[int, int]], replicas: int, limit: int) -> None:
    lengths, prompts = zip(*examples, strict=True)
    plan = plan_micro_batches(lengths, replicas=replicas, tokens_per_micro_batch=limit, prompts=prompts)
    micro_batches = [part for replica in plan for part in replica]
    assert sorted(i for part in micro_batches for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= limit or len(part) == 1 for part in micro_batches)
    costs = [length * (1 + length / ATTENTION_TOKENS) for length in lengths]
    loads = [sum(costs[i] for part in replica for i in part) for replica in plan]
    mean = sum(costs) / replicas
    assert max(loads) <= mean + max(0.25 * mean, max(costs)) + 1e-6


def test_a_prompt_that_is_computed_once_counts_once() -> None:
    """2 long prompts with short completions cost what 2 of the 8 short ones with long completions do."""
    shapes = [(400, 8)] * 2 + [(8, 100)] * 8
    sequences = [[prompt] * length + [99] * more for prompt, (length, more) in enumerate(shapes) for _ in range(4)]
    masks = [[False] * length + [True] * more for length, more in shapes for _ in range(4)]
    division = Division.of(pack(sequences, masks), replicas=2, tokens_per_micro_batch=10**6, shares_prompts=True)
    prompts = [sorted({index // 4 for part in replica for index in part}) for replica in division.plan]
    assert sorted(len(each) for each in prompts) == [5, 5]
    assert [sum(each < 2 for each in replica) for replica in prompts] == [1, 1]
    # 4 x (8 + 4 x 100) + (400 + 4 x 8) = 2064 tokens fit, and no more
    for limit, micro_batches in ((2064, 1), (2063, 2)):
        division = Division.of(division.batch, replicas=2, tokens_per_micro_batch=limit, shares_prompts=True)
        assert [len(replica) for replica in division.plan] == [micro_batches] * 2


def test_of_a_pair_only_what_both_begin_with_counts_once() -> None:
    begun = [[number] * 20 + end for number in range(4) for end in ([50] * 5, [60] * 5)]  # 30 tokens a pair
    apart = [[number + 10 * i] * 25 for number in range(4) for i in range(2)]  # 50
    trained_at_the_end = [[False] * 24 + [True]] * 8
    for sequences, together in ((begun, 2), (apart, 1)):
        batch = PreferenceBatch(**vars(pack(sequences, trained_at_the_end)))
        (plan,) = Division.of(batch, replicas=1, tokens_per_micro_batch=64, shares_prompts=True).plan
        assert [len(part) for part in plan] == [together] * (4 // together)


@settings(max_examples=200, deadline=None)
@given(
    examples=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 6)), min_size=1, max_size=60),
    prompt=st.lists(st.integers(0, 200), min_size=7, max_size=7),
    replicas=st.integers(1, 8),
    limit=st.integers(1, 4000),
)
def test_a_micro_batch_computes_at_most_its_tokens(
    examples: list[tuple[int, int]], prompt: list[int], replicas: int, limit: int
) -> None:
    prompts = [number for _, number in examples]
    again = [prompt[number] for number in prompts]
    lengths = [saved + completion for saved, (completion, _) in zip(again, examples, strict=True)]
    plan = plan_micro_batches(lengths, replicas=replicas, tokens_per_micro_batch=limit, prompts=prompts, again=again)
    micro_batches = [part for replica in plan for part in replica]
    assert sorted(i for part in micro_batches for i in part) == list(range(len(lengths)))
    for part in micro_batches:
        once = {prompts[i]: again[i] for i in part}
        computed = sum(lengths[i] - again[i] for i in part) + sum(once.values())
        assert computed <= limit or len(part) == 1


def test_replicas_get_equal_cost_not_equal_counts() -> None:
    plan = plan_micro_batches([8000, 500, 500, 500, 500], replicas=2, tokens_per_micro_batch=100_000)
    assert plan == [[[0]], [[1, 2, 3, 4]]]


def test_the_square_of_the_length_counts() -> None:
    # Two halves have the tokens of one whole, but not its attention.
    long, half = 2 * ATTENTION_TOKENS, ATTENTION_TOKENS
    plan = plan_micro_batches([long, half, half, half], replicas=2, tokens_per_micro_batch=1 << 20)
    assert plan == [[[0]], [[1, 2, 3]]]


def test_a_replica_without_examples_gets_fillers() -> None:
    assert plan_micro_batches([5], replicas=2, tokens_per_micro_batch=10) == [[[0]], [[]]]


def test_a_plan_is_the_same_every_time() -> None:
    lengths = [7] * 9 + [3] * 4
    plans = {str(plan_micro_batches(lengths, replicas=3, tokens_per_micro_batch=14)) for _ in range(5)}
    assert len(plans) == 1


def test_no_replicas_are_an_error() -> None:
    with pytest.raises(ValueError, match="0 replicas"):
        plan_micro_batches([1], replicas=0, tokens_per_micro_batch=10)
