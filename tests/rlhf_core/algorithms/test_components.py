"""Loss terms beside the policy gradient: a teacher's log-probs, and the cross-entropy of good completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms import Algorithm, build_algorithm
from rlhf_core.losses.aggregation import loss_weights
from rlhf_core.types import Minibatch, Scored
from tests.rlhf_core.algorithms.batches import GROUPS, LENGTHS, MASK, NAMES, REWARDS, minibatch, rl_config, scored

NAME = "on-policy-distillation"
TEACHER = {"model": "teacher", "coefficient": 0.3}


def judged(name: str, **block: Any) -> tuple[Algorithm, Minibatch]:
    config = rl_config(name, **block)
    algorithm = build_algorithm(config)
    rewards = torch.tensor(REWARDS)
    batch = algorithm.advantages(scored(config), rewards, torch.tensor(GROUPS), 0.1, {"exact": rewards})
    return algorithm, minibatch(config, batch)


@pytest.mark.parametrize("name", [name for name in NAMES if name != NAME])
def test_a_teacher_judges_each_token_beside_the_rewards(name: str) -> None:
    (_, alone), (_, both) = judged(name), judged(name, teacher=TEACHER)
    assert both.teacher_logprobs is not None
    assert both.old_logprobs is not None
    wanted = alone.advantages + 0.3 * (both.teacher_logprobs - both.old_logprobs) * both.loss_mask
    torch.testing.assert_close(both.advantages, wanted)


def test_without_rewards_the_teacher_alone_trains() -> None:
    config = rl_config(NAME, rewards={}, group_size=1)
    algorithm, before = build_algorithm(config), scored(config)
    e = algorithm.advantages(before, torch.zeros(4), torch.arange(4), 0.0)
    assert e.teacher_logprobs is not None
    assert e.old_logprobs is not None
    torch.testing.assert_close(e.advantages, (e.teacher_logprobs - e.old_logprobs) * e.loss_mask)
    same = algorithm.advantages(replace(before, teacher_logprobs=e.old_logprobs), torch.zeros(4), torch.arange(4), 0.0)
    assert not same.advantages.any(), "a student that is its teacher has nothing to learn"


def test_a_kl_in_the_reward_counts_without_rewards_too() -> None:
    config = rl_config(NAME, rewards={}, group_size=1, kl={"coefficient": 0.1})
    e = build_algorithm(config).advantages(scored(config), torch.zeros(4), torch.arange(4), 0.5)
    assert e.ref_logprobs is not None
    assert e.teacher_logprobs is not None
    assert e.old_logprobs is not None
    old = e.old_logprobs
    wanted = ((e.teacher_logprobs - old) - 0.5 * (old - e.ref_logprobs)) * e.loss_mask
    torch.testing.assert_close(e.advantages, wanted)


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Over all tokens that the student could sample next, each as often as it does, in float64."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    q, p = student.log_softmax(-1), teacher.log_softmax(-1)
    (wanted,) = torch.autograd.grad((q.exp() * (q - p)).sum(), student, retain_graph=True)
    config = rl_config(NAME, rewards={}, group_size=1)
    algorithm = build_algorithm(config)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(7):
        old = _at(q.detach(), token)
        one = Scored(
            input_ids=torch.tensor([0, token]), sequence_lengths=torch.tensor([2]),
            loss_mask=torch.tensor([False, True]), rollout_logprobs=old, old_logprobs=old,
            teacher_logprobs=_at(p, token),
        )  # fmt: skip
        batch = algorithm.advantages(one, torch.zeros(1), torch.zeros(1, dtype=torch.int64), 0.0)
        loss, _ = algorithm.policy_loss(_at(q, token), None, minibatch(config, batch), 0.0)
        total = total + q[token].exp().detach() * loss
    (found,) = torch.autograd.grad(total, student)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def _at(logprobs: Tensor, token: int) -> Tensor:
    """Of a prompt of one token, and `token` after it."""
    return torch.stack([torch.zeros((), dtype=torch.float64), logprobs[token]])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (NAME, "ppo")])
def test_good_completions_are_imitated(name: str) -> None:
    """Those with a reward of 1 or more: the first and the last."""
    cross_entropy = {"coefficient": 0.7, "least_reward": 1.0}
    (plain, alone), (algorithm, e) = judged(name), judged(name, cross_entropy=cross_entropy)
    assert e.imitated is not None
    sequences = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    assert e.imitated.tolist() == [t and s in (0, 3) for t, s in zip(MASK, sequences.tolist(), strict=True)]
    lengths, kind = torch.tensor(LENGTHS), algorithm.config.aggregation
    e = replace(e, imitation_weights=loss_weights(e.imitated, lengths, kind, length=4))
    logprobs = torch.where(e.loss_mask, torch.linspace(-3, -1, len(MASK)), 0.0)
    loss, metrics = algorithm.policy_loss(logprobs, None, e, 0.0)
    without, _ = plain.policy_loss(logprobs, None, alone, 0.0)
    of_each = [-logprobs[(sequences == s) & e.loss_mask] for s in (0, 3)]
    wanted = {
        "token": torch.cat(of_each).mean(),
        "sequence": torch.stack([tokens.mean() for tokens in of_each]).mean(),
        "constant": torch.stack([tokens.sum() for tokens in of_each]).sum() / (4 * 4),
    }[kind]
    torch.testing.assert_close(loss - without, 0.7 * wanted)
    torch.testing.assert_close(metrics["cross_entropy"].value, wanted)
