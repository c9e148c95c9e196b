"""The advantages of every algorithm against the papers' formulas in plain Python, sequence by sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, pstdev, stdev

import pytest
import torch

from rlhf_core.algorithms import build_algorithm
from rlhf_core.types import Scored
from tests.rlhf_core.algorithms.batches import ENDS, GROUPS, LENGTHS, MASK, NAMES, REWARDS, STEPS, rl_config, scored

Tokens = list[list[float]]  # of each sequence, one value for each trained token
BETA = 0.3
KL_IN_REWARD = tuple(name for name in NAMES if name != "gdpo")  # which has formulas of its own: test_gdpo.py
BY_STEPS: tuple[str, ...] = ("ppo", "reinforce++", "grpo", "dr-grpo", "dapo")


def tokens_of(packed: torch.Tensor | tuple[float, ...]) -> Tokens:
    """What belongs to trained tokens, sequence by sequence."""
    found: Tokens = []
    start = 0
    for length in LENGTHS:
        found.append([float(packed[t]) for t in range(start, start + length) if MASK[t]])
        start += length
    return found


def kl_rewards(e: Scored, kind: str) -> Tokens:
    assert e.old_logprobs is not None
    assert e.ref_logprobs is not None
    difference = tokens_of(e.old_logprobs - e.ref_logprobs)
    estimates = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
    return [[-BETA * estimates[kind](d) for d in sequence] for sequence in difference]


def returns(rewards: Tokens, gamma: float) -> Tokens:
    return [[sum(gamma ** (u - t) * r[u] for u in range(t, len(r))) for t in range(len(r))] for r in rewards]


def gae(rewards: Tokens, values: Tokens, gamma: float, lam: float) -> Tokens:
    found = []
    for r, v in zip(rewards, values, strict=True):
        after = [*v[1:], 0.0]
        errors = [r[t] + gamma * after[t] - v[t] for t in range(len(r))]
        found.append([sum((gamma * lam) ** (u - t) * errors[u] for u in range(t, len(r))) for t in range(len(r))])
    return found


def whitened(advantages: Tokens) -> Tokens:
    every = [a for sequence in advantages for a in sequence]
    return [[(a - fmean(every)) / pstdev(every) for a in sequence] for sequence in advantages]


def centred(rewards: list[float], *, deviation: bool) -> list[float]:
    found = []
    for reward, group in zip(rewards, GROUPS, strict=True):
        peers = [r for r, g in zip(rewards, GROUPS, strict=True) if g == group]
        found.append((reward - fmean(peers)) / (stdev(peers) if deviation else 1))
    return found


def left_out(rewards: list[float]) -> list[float]:
    found = []
    for i, reward in enumerate(rewards):
        found.append(reward - fmean(r for j, r in enumerate(rewards) if j != i and GROUPS[j] == GROUPS[i]))
    return found


def spread(per_sequence: list[float], like: Tokens) -> Tokens:
    return [[value] * len(tokens) for value, tokens in zip(per_sequence, like, strict=True)]


def outcome(rewards: Tokens) -> Tokens:
    """With each completion's own reward at its last token."""
    return [[*tokens[:-1], tokens[-1] + reward] for tokens, reward in zip(rewards, REWARDS, strict=True)]


def expected(name: str, e: Scored, kind: str) -> Tokens:
    """With the KL in the reward."""
    penalties = kl_rewards(e, kind)
    whole = [reward + sum(tokens) for reward, tokens in zip(REWARDS, penalties, strict=True)]
    match name:
        case "ppo":
            assert e.values is not None
            return whitened(gae(outcome(penalties), tokens_of(e.values), gamma=0.9, lam=0.8))
        case "reinforce++":
            return whitened(returns(outcome(penalties), gamma=0.9))
        case "reinforce++-baseline":
            return whitened(spread(centred(whole, deviation=False), penalties))
        case "rloo":
            return spread(left_out(whole), penalties)
        case "dr-grpo":
            return spread(centred(whole, deviation=False), penalties)
        case "on-policy-distillation":
            assert e.teacher_logprobs is not None
            assert e.old_logprobs is not None
            to_teacher = tokens_of(e.teacher_logprobs - e.old_logprobs)
            parts = zip(spread(centred([*REWARDS], deviation=False), penalties), penalties, to_teacher, strict=True)
            return [[sum(token) for token in zip(*sequence, strict=True)] for sequence in parts]
        case "grpo" | "dapo" | "gspo" | "gmpo" | "cispo" | "sapo" | "dppo":
            return spread(centred(whole, deviation=True), penalties)


def own_settings(name: str) -> dict[str, object]:
    discounts = {"ppo": {"gamma": 0.9, "gae_lambda": 0.8}, "reinforce++": {"gamma": 0.9}}
    return dict(discounts.get(name, {}))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", KL_IN_REWARD)
def test_equals_the_formula_with_the_kl_in_the_reward(name: str, kind: str) -> None:
    # The coefficient of the step counts, not that of the config, where an adaptive one starts.
    kl = {"coefficient": 9.0, "place": "reward", "estimator": kind}
    config = rl_config(name, kl=kl, **own_settings(name))
    before = scored(config)
    after = build_algorithm(config).advantages(before, torch.tensor(REWARDS), torch.tensor(GROUPS), BETA)
    close(after.advantages, expected(name, before, kind))


def close(advantages: torch.Tensor, expected: Tokens) -> None:
    for found, wanted in zip(tokens_of(advantages), expected, strict=True):
        assert found == pytest.approx(wanted, abs=2e-5)
    assert bool((advantages[~torch.tensor(MASK)] == 0).all())


@pytest.mark.parametrize("name", KL_IN_REWARD)
def test_a_kl_in_the_loss_is_not_in_the_reward_too(name: str) -> None:
    found = []
    for kl in ({"coefficient": 5.0, "place": "loss"}, {"coefficient": 0.0, "place": "reward"}):
        config = rl_config(name, kl=kl)
        algorithm = build_algorithm(config)
        assert not algorithm.kl_in_reward
        e = scored(config)
        found.append(algorithm.advantages(e, torch.tensor(REWARDS), torch.tensor(GROUPS), 5.0).advantages)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_rloo_may_subtract_the_kl_token_by_token_after_the_baseline() -> None:
    config = rl_config("rloo", kl={"coefficient": 9.0}, kl_per_token=True)
    e = scored(config)
    after = build_algorithm(config).advantages(e, torch.tensor(REWARDS), torch.tensor(GROUPS), BETA)
    penalties = returns(kl_rewards(e, "k1"), gamma=1.0)
    baseline = left_out(list(REWARDS))
    wanted = [[a + p for p in tokens] for a, tokens in zip(baseline, penalties, strict=True)]
    close(after.advantages, wanted)


@pytest.mark.parametrize("name", BY_STEPS)
def test_rewards_of_steps(name: str) -> None:
    config = rl_config(name, **own_settings(name))
    e = scored(config, process_rewards=torch.tensor(STEPS), step_ends=torch.tensor(ENDS))
    after = build_algorithm(config).advantages(e, torch.tensor(REWARDS), torch.tensor(GROUPS), 0.0)
    steps, ends = tokens_of(STEPS), tokens_of(ENDS)
    with_steps = outcome(steps)
    if name == "ppo":
        assert e.values is not None
        wanted = whitened(gae(with_steps, tokens_of(e.values), gamma=0.9, lam=0.8))
    elif name == "reinforce++":
        wanted = whitened(returns(with_steps, gamma=0.9))
    else:
        # Of each step its reward less the mean of all steps of its prompt, over their deviation; then summed from the
        # token on. The completion's own reward is normalised as without steps.
        deviation = name != "dr-grpo"
        scaled = [
            [
                (r - fmean(peers)) / (stdev(peers) if deviation else 1) if end else 0.0
                for r, end in zip(s, m, strict=True)
            ]
            for s, m, g in zip(steps, ends, GROUPS, strict=True)
            for peers in [steps_of(g, steps, ends)]
        ]
        own = centred(list(REWARDS), deviation=deviation)
        wanted = [[a + p for p in tokens] for a, tokens in zip(own, returns(scaled, gamma=1.0), strict=True)]
    close(after.advantages, wanted)


def over_the_step(rewards: list[float]) -> list[float]:
    """Rewards less the mean of their group, over the deviation of all of them."""
    return [centre / (stdev(rewards) + 1e-6) for centre in centred(rewards, deviation=False)]


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "dppo"])
def test_rewards_may_be_divided_by_the_deviation_of_the_whole_step(name: str) -> None:
    config = rl_config(name, divide_by_deviation="batch")
    e = scored(config)
    after = build_algorithm(config).advantages(e, torch.tensor(REWARDS), torch.tensor(GROUPS), 0.0)
    close(after.advantages, spread(over_the_step([*REWARDS]), tokens_of(e.rollout_logprobs)))


def test_of_a_single_group_the_deviation_of_the_step_is_that_of_the_group() -> None:
    of_each = []
    for divided in (True, "batch"):
        config = rl_config("grpo", divide_by_deviation=divided, group_size=4)
        groups = torch.zeros(4, dtype=torch.int64)
        of_each.append(build_algorithm(config).advantages(scored(config), torch.tensor(REWARDS), groups, 0.0))
    torch.testing.assert_close(of_each[0].advantages, of_each[1].advantages, rtol=1e-6, atol=0)


def test_rewards_of_steps_are_divided_by_the_deviation_of_all_steps() -> None:
    config = rl_config("grpo", divide_by_deviation="batch")
    e = scored(config, process_rewards=torch.tensor(STEPS), step_ends=torch.tensor(ENDS))
    after = build_algorithm(config).advantages(e, torch.tensor(REWARDS), torch.tensor(GROUPS), 0.0)
    steps, ends = tokens_of(STEPS), tokens_of(ENDS)
    deviation = stdev([r for group in set(GROUPS) for r in steps_of(group, steps, ends)]) + 1e-6
    scaled = [
        [(r - fmean(steps_of(g, steps, ends))) / deviation if end else 0.0 for r, end in zip(s, m, strict=True)]
        for s, m, g in zip(steps, ends, GROUPS, strict=True)
    ]
    parts = zip(over_the_step([*REWARDS]), returns(scaled, gamma=1.0), strict=True)
    close(after.advantages, [[own + p for p in tokens] for own, tokens in parts])


def steps_of(group: int, steps: Tokens, ends: Tokens) -> list[float]:
    """The rewards of all steps of all completions of one prompt."""
    return [
        r
        for s, m, g in zip(steps, ends, GROUPS, strict=True)
        for r, end in zip(s, m, strict=True)
        if end and g == group
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_STEPS])
def test_an_algorithm_that_judges_whole_completions_takes_no_rewards_of_steps(name: str) -> None:
    config = rl_config(name)
    e = scored(config, process_rewards=torch.tensor(STEPS), step_ends=torch.tensor(ENDS))
    with pytest.raises(ValueError, match="judges whole completions: it takes no rewards of steps"):
        build_algorithm(config).advantages(e, torch.tensor(REWARDS), torch.tensor(GROUPS), 0.0)


@pytest.mark.parametrize("name", BY_STEPS)
def test_a_step_must_end_at_a_token_of_the_policy(name: str) -> None:
    config = rl_config(name)
    ends = torch.tensor(ENDS)
    ends[0] = True
    e = scored(config, process_rewards=torch.tensor(STEPS), step_ends=ends)
    with pytest.raises(ValueError, match="token that the policy did not sample"):
        build_algorithm(config).advantages(e, torch.tensor(REWARDS), torch.tensor(GROUPS), 0.0)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ppo"])
def test_equal_rewards_teach_nothing(name: str) -> None:
    config = rl_config(name)
    e = scored(config)
    e = replace(e, teacher_logprobs=e.old_logprobs)
    rewards = torch.full((4,), 0.1)
    after = build_algorithm(config).advantages(e, rewards, torch.tensor(GROUPS), 0.0, {"exact": rewards})
    assert after.advantages.tolist() == [0.0] * len(MASK)


def test_a_completion_without_sampled_tokens_cannot_carry_a_reward() -> None:
    config = rl_config("reinforce++")
    e = scored(config, loss_mask=torch.zeros(len(MASK), dtype=torch.bool))
    with pytest.raises(ValueError, match="without a sampled token"):
        build_algorithm(config).advantages(e, torch.tensor(REWARDS), torch.tensor(GROUPS), 0.0)
