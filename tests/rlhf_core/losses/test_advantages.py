from __future__ import annotations

import pytest
import torch

from rlhf_core.losses.advantages import (
    DivideByStd,
    broadcast_to_tokens,
    discounted_returns,
    gae,
    group_normalised,
    leave_one_out,
    process_advantages,
    whiten,
)


def test_gae_worked_by_hand() -> None:
    # One sequence: a prompt token, then three sampled ones; gamma 0.9, lambda 0.5.
    # errors: 0 + .9 * 2 - 1 = .8;  1 + .9 * 3 - 2 = 1.7;  4 - 3 = 1
    # advantages: 1;  1.7 + .45 * 1 = 2.15;  .8 + .45 * 2.15 = 1.7675
    advantages, returns = gae(
        torch.tensor([9.0, 0.0, 1.0, 4.0]),
        torch.tensor([7.0, 1.0, 2.0, 3.0]),
        torch.tensor([False, True, True, True]),
        torch.tensor([4]),
        gamma=0.9,
        lam=0.5,
    )
    assert advantages.tolist() == pytest.approx([0.0, 1.7675, 2.15, 1.0])
    assert returns.tolist() == pytest.approx([0.0, 2.7675, 4.15, 4.0])


def test_gae_neither_decays_across_environment_tokens_nor_leaks_between_sequences() -> None:
    rewards = torch.tensor([0.0, 1.0, 4.0])
    values = torch.tensor([1.0, 2.0, 3.0])
    dense, _ = gae(rewards, values, torch.ones(3, dtype=torch.bool), torch.tensor([3]), gamma=0.9, lam=0.5)
    # The same three steps with prompt and environment tokens around them (50: not to be read), between two neighbours.
    mask = torch.tensor([True, False, True, False, False, True, True, False, True, True])
    packed_rewards = torch.tensor([5.0, 50.0, 0.0, 50.0, 50.0, 1.0, 4.0, 50.0, 6.0, 7.0])
    packed_values = torch.tensor([2.0, 50.0, 1.0, 50.0, 50.0, 2.0, 3.0, 50.0, 1.0, 1.0])
    lengths = torch.tensor([1, 7, 2])
    packed, _ = gae(packed_rewards, packed_values, mask, lengths, gamma=0.9, lam=0.5)
    assert packed[[2, 5, 6]].tolist() == pytest.approx(dense.tolist())
    assert packed[0].item() == pytest.approx(5.0 - 2.0)
    assert packed[~mask].tolist() == [0.0] * 4
    assert packed[9].item() == pytest.approx(6.0)
    assert packed[8].item() == pytest.approx(6.0 + 0.9 * 1.0 - 1.0 + 0.45 * 6.0)


def test_gae_with_lambda_one_is_the_discounted_return_minus_the_value() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(6), torch.randn(6)
    mask = torch.tensor([False, True, True, False, True, True])
    advantages, returns = gae(rewards, values, mask, torch.tensor([6]), gamma=0.9, lam=1.0)
    future = 0.0
    for index in (5, 4, 2, 1):
        future = rewards[index].item() + 0.9 * future
        assert returns[index].item() == pytest.approx(future, abs=1e-6)
        assert advantages[index].item() == pytest.approx(future - values[index].item(), abs=1e-6)


def test_gae_of_a_batch_without_trained_tokens_is_zero() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    advantages, returns = gae(torch.ones(3), torch.ones(3), nothing, torch.tensor([1, 2]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [0.0, 0.0, 0.0]


def in_double(rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float) -> list[float]:
    """GAE of one sequence by its recursion, in double precision."""
    advantages = [0.0] * len(mask)
    later = value_after = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            later = advantages[t] = rewards[t] + gamma * value_after - values[t] + gamma * lam * later
            value_after = values[t]
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0)])
def test_gae_of_sequences_of_any_lengths_equals_the_recursion_in_double_precision(gamma: float, lam: float) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 40, 3, 17, 17, 1, 90, 2])
    mask = torch.rand(int(lengths.sum()), generator=draw) < 0.7
    mask[1:41] = False  # the second sequence trains nothing
    rewards, values = torch.randn(2, mask.numel(), generator=draw)
    advantages, returns = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam)
    parts = zip(*(each.split(lengths.tolist()) for each in (rewards, values, mask)), strict=True)
    expected = [a for r, v, m in parts for a in in_double(r.tolist(), v.tolist(), m.tolist(), gamma, lam)]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert torch.equal(returns, torch.where(mask, advantages + values, 0.0))


def test_one_long_sequence_among_a_million_short_ones_needs_no_table() -> None:
    """Padded to the longest, these tokens would take 400 GB."""
    long, short = 100_000, 1_000_000
    lengths = torch.cat([torch.ones(short, dtype=torch.int64), torch.tensor([long])])
    ones = torch.ones(short + long)
    returns = discounted_returns(ones, ones.bool(), lengths, gamma=1.0)
    assert torch.equal(returns[:short], ones[:short])
    assert torch.equal(returns[short:], torch.arange(long, 0, -1).float())


def test_whiten_uses_the_population_variance_of_trained_tokens() -> None:
    mask = torch.tensor([True, True, False, True])
    whitened = whiten(torch.tensor([1.0, 2.0, 100.0, 6.0]), mask)
    # mean 3, variance (4 + 1 + 9) / 3
    scale = (14 / 3) ** 0.5
    assert whitened.tolist() == pytest.approx([-2 / scale, -1 / scale, 0.0, 3 / scale])


def test_whitened_equal_advantages_are_zero() -> None:
    assert whiten(torch.full((7,), 0.1), torch.ones(7, dtype=torch.bool)).tolist() == [0.0] * 7


def test_no_trained_token_cannot_be_whitened() -> None:
    with pytest.raises(ValueError, match="no trained token"):
        whiten(torch.ones(4), torch.zeros(4, dtype=torch.bool))


def test_group_normalised_worked_by_hand() -> None:
    # Group 7: 1, 3, 5: mean 3, unbiased deviation 2. Group 2: 0, 1: mean .5, unbiased deviation sqrt(.5).
    rewards = torch.tensor([1.0, 0.0, 3.0, 1.0, 5.0])
    groups = torch.tensor([7, 2, 7, 2, 7])
    half = 0.5 / 0.5**0.5
    assert group_normalised(rewards, groups).tolist() == pytest.approx([-1.0, -half, 0.0, half, 1.0], abs=2e-6)
    centred = group_normalised(rewards, groups, divide_by_std=False)
    assert centred.tolist() == pytest.approx([-2.0, -0.5, 0.0, 0.5, 2.0])


@pytest.mark.parametrize("divide_by_std", [True, False, "batch"])
def test_equal_rewards_and_groups_of_one_are_exactly_zero(divide_by_std: DivideByStd) -> None:
    rewards = torch.tensor([0.1] * 7 + [3.0])
    groups = torch.tensor([0] * 7 + [1])
    assert group_normalised(rewards, groups, divide_by_std=divide_by_std).tolist() == [0.0] * 8


def test_broadcast_to_tokens() -> None:
    mask = torch.tensor([False, True, False, True, True])
    spread = broadcast_to_tokens(torch.tensor([2.0, -1.0]), mask, torch.tensor([2, 3]))
    assert spread.tolist() == [0.0, 2.0, 0.0, -1.0, -1.0]


def test_leave_one_out_worked_by_hand() -> None:
    # Group 7: 1, 3, 5, against (3 + 5) / 2, (1 + 5) / 2, (1 + 3) / 2. Group 2: 0 against 1, 1 against 0.
    advantages = leave_one_out(torch.tensor([1.0, 0.0, 3.0, 1.0, 5.0]), torch.tensor([7, 2, 7, 2, 7]))
    assert advantages.tolist() == pytest.approx([-3.0, -1.0, 0.0, 1.0, 3.0])


def test_leave_one_out_of_equal_rewards_is_exactly_zero_and_of_one_an_error() -> None:
    assert leave_one_out(torch.tensor([0.1] * 7), torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7
    with pytest.raises(ValueError, match="at least two completions"):
        leave_one_out(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]))


def test_discounted_returns_worked_by_hand() -> None:
    # One sequence: prompt, token, environment, token, token; then another. 50 is not to be read.
    mask = torch.tensor([False, True, False, True, True, True])
    rewards = torch.tensor([50.0, 1.0, 50.0, 2.0, 4.0, 8.0])
    returns = discounted_returns(rewards, mask, torch.tensor([5, 1]), gamma=0.5)
    assert returns.tolist() == [0.0, 1 + 0.5 * (2 + 0.5 * 4), 0.0, 2 + 0.5 * 4, 4.0, 8.0]


# Two completions of one prompt with 2 and 1 steps, rewards 1, 2 and 6: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7.
PROCESS = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 6.0])
ENDS = torch.tensor([False, True, False, True, False, False, True])
STEP_MASK = torch.tensor([False, True, True, True, False, True, True])
STEP_LENGTHS = torch.tensor([4, 3])


def test_process_advantages_worked_by_hand() -> None:
    groups = torch.tensor([3, 3])
    centred = process_advantages(PROCESS, ENDS, groups, STEP_MASK, STEP_LENGTHS, divide_by_std=False)
    assert centred.tolist() == pytest.approx([0.0, -3.0, -1.0, -1.0, 0.0, 3.0, 3.0])
    normalised = process_advantages(PROCESS, ENDS, groups, STEP_MASK, STEP_LENGTHS)
    assert normalised.tolist() == pytest.approx([value / 7**0.5 for value in centred.tolist()], abs=1e-5)


def test_a_step_of_reward_zero_is_a_step() -> None:
    rewards = torch.where(PROCESS == 2, 0.0, PROCESS)  # 1, 0, 6
    advantages = process_advantages(rewards, ENDS, torch.tensor([0, 0]), STEP_MASK, STEP_LENGTHS, divide_by_std=False)
    mean = 7 / 3
    assert advantages[[1, 2, 5]].tolist() == pytest.approx([1 - 2 * mean, -mean, 6 - mean])


@pytest.mark.parametrize("divide_by_std", [True, False, "batch"])
def test_equal_steps_and_a_single_step_are_exactly_zero(divide_by_std: DivideByStd) -> None:
    for rewards, groups in ((torch.where(ENDS, 0.1, 0.0), [0, 0]), (PROCESS, [0, 1])):
        advantages = process_advantages(
            rewards, ENDS, torch.tensor(groups), STEP_MASK, STEP_LENGTHS, divide_by_std=divide_by_std
        )
        assert advantages[4:].tolist() == [0.0, 0.0, 0.0]


def test_groups_of_steps_are_apart() -> None:
    advantages = process_advantages(PROCESS, ENDS, torch.tensor([0, 1]), STEP_MASK, STEP_LENGTHS, divide_by_std=False)
    assert advantages.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0])
