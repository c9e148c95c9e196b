"""The loss of every algorithm: at the old policy it is policy gradient, and independent of the division into
micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.algorithms import Algorithm, build_algorithm
from rlhf_core.packing import select
from rlhf_core.types import Minibatch
from tests.rlhf_core.algorithms.batches import GROUPS, LENGTHS, MASK, NAMES, REWARDS, minibatch, rl_config, scored

EVERY = pytest.mark.parametrize("name", NAMES)
AGGREGATED: dict[str, str] = {
    "ppo": "token", "reinforce++": "token", "reinforce++-baseline": "token", "rloo": "constant", "grpo": "sequence",
    "dr-grpo": "constant", "dapo": "token", "gdpo": "sequence", "gspo": "sequence", "cispo": "token",
    "gmpo": "sequence", "sapo": "sequence", "dppo": "sequence",
    "on-policy-distillation": "token",
}  # fmt: skip


def prepared(name: str, **block: Any) -> tuple[Algorithm, Minibatch]:
    """An algorithm and a minibatch with its advantages."""
    config = rl_config(name, **block)
    algorithm = build_algorithm(config)
    rewards = torch.tensor(REWARDS)
    e = algorithm.advantages(scored(config), rewards, torch.tensor(GROUPS), 0.1, {"exact": rewards})
    return algorithm, minibatch(config, e)


def gradient(algorithm: Algorithm, logprobs: Tensor, e: Minibatch, kl_coefficient: float = 0.0) -> Tensor:
    logprobs = logprobs.clone().requires_grad_()
    loss, _ = algorithm.policy_loss(logprobs, None, e, kl_coefficient)
    (found,) = torch.autograd.grad(loss, logprobs)
    return found


def test_every_algorithm_has_its_line_in_the_table() -> None:
    assert {name: rl_config(name).settings.aggregation for name in NAMES} == AGGREGATED


@EVERY
def test_at_the_old_policy_the_gradient_is_that_of_policy_gradient(name: str) -> None:
    """-weight x advantage at each trained token, the weight that of the algorithm's own mean."""
    algorithm, e = prepared(name)
    trained, sequences, longest = sum(MASK), len(LENGTHS), 4
    weights = {
        "token": [1 / trained] * trained,
        "sequence": [1 / (n * sequences) for n in (2, 3, 1, 2) for _ in range(n)],
        "constant": [1 / (sequences * longest)] * trained,
    }[AGGREGATED[name]]
    assert e.old_logprobs is not None
    assert float(e.advantages.abs().max()) > 0.1
    old = e.rollout_logprobs if name == "dppo" else e.old_logprobs  # of which the ratio is
    found = gradient(algorithm, old, e)
    torch.testing.assert_close(found[e.loss_mask], -torch.tensor(weights) * e.advantages[e.loss_mask])
    assert bool((found[~e.loss_mask] == 0).all())


@EVERY
def test_old_log_probs_need_no_forward_where_there_is_one_update(name: str) -> None:
    algorithm, e = prepared(name)
    assert e.old_logprobs is not None
    known = gradient(algorithm, e.old_logprobs, e)
    torch.testing.assert_close(gradient(algorithm, e.old_logprobs, replace(e, old_logprobs=None)), known)


def test_aggregations_are_settings() -> None:
    by_sequence, by_token = (prepared("grpo", aggregation=kind)[1].loss_weights for kind in ("sequence", "token"))
    assert by_sequence is not None
    assert by_token is not None
    assert by_token[list(MASK)].tolist() == pytest.approx([1 / 8] * 8)
    assert by_sequence[2].item() == pytest.approx(1 / 8)
    assert by_sequence[10].item() == pytest.approx(1 / 4)
    longer = prepared("dr-grpo", aggregation_length=10)[1].loss_weights
    assert longer is not None
    assert longer[2].item() == pytest.approx(1 / 40)


ALL_TERMS: dict[str, Any] = {
    "kl": {"coefficient": 0.2, "place": "loss", "estimator": "k3"}, "entropy_coefficient": 0.05,
    "mismatch": {"correction": "sequence_filter", "low": 0.95, "high": 1.5},
}  # fmt: skip


@EVERY
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(len(LENGTHS))), cuts=st.sets(st.integers(1, len(LENGTHS) - 1)))
def test_any_micro_batches_give_the_same_loss_and_gradient(name: str, order: list[int], cuts: set[int]) -> None:
    algorithm, e = prepared(name, **(ALL_TERMS | ({"mismatch": None} if name == "dppo" else {})))
    assert e.old_logprobs is not None
    noise = torch.Generator().manual_seed(1)
    logprobs = (e.old_logprobs + 0.2 * torch.randn(len(MASK), generator=noise)).requires_grad_()
    entropy = torch.rand(len(MASK), generator=noise, requires_grad=True)
    whole, metrics = algorithm.policy_loss(logprobs, entropy, e, 0.2)
    wanted = torch.autograd.grad(whole, (logprobs, entropy))

    def rows(indices: list[int]) -> Tensor:
        starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
        return torch.cat([torch.arange(int(starts[i]), int(starts[i]) + LENGTHS[i]) for i in indices])

    edges = [0, *sorted(cuts), len(order)]
    parts = [order[start:end] for start, end in pairwise(edges)]
    results = [algorithm.policy_loss(logprobs[rows(part)], entropy[rows(part)], select(e, part), 0.2) for part in parts]
    total = torch.stack([loss for loss, _ in results]).sum()
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    for found, expected in zip(torch.autograd.grad(total, (logprobs, entropy)), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    for name, metric in metrics.items():
        assert sum(float(parts[name].value) for _, parts in results) == pytest.approx(float(metric.value), abs=1e-5)


@EVERY
def test_the_kl_in_the_loss_has_the_coefficient_of_the_step(name: str) -> None:
    algorithm, e = prepared(name, kl={"coefficient": 9.0, "place": "loss", "estimator": "k2"})
    assert e.old_logprobs is not None
    assert e.ref_logprobs is not None
    assert e.loss_weights is not None
    without = gradient(algorithm, e.old_logprobs, e, kl_coefficient=0.0)
    found = gradient(algorithm, e.old_logprobs, e, kl_coefficient=0.25)
    expected = without + 0.25 * e.loss_weights * (e.old_logprobs - e.ref_logprobs)
    torch.testing.assert_close(found, torch.where(e.loss_mask, expected, 0.0))


def test_the_entropy_bonus_pulls_entropy_up() -> None:
    algorithm, e = prepared("grpo", entropy_coefficient=0.3)
    entropy = torch.ones(len(MASK), requires_grad=True)
    assert e.old_logprobs is not None
    assert e.loss_weights is not None
    loss, _ = algorithm.policy_loss(e.old_logprobs, entropy, e, 0.0)
    loss.backward()
    torch.testing.assert_close(entropy.grad, torch.where(e.loss_mask, -0.3 * e.loss_weights, 0.0))


CORRECTED = pytest.mark.parametrize("name", [name for name in NAMES if name != "dppo"])


@CORRECTED
def test_the_mismatch_correction_weighs_the_policy_gradient(name: str) -> None:
    whole = name in ("gspo", "gmpo")
    correction = "sequence_filter" if whole else "truncate"
    block = {"mismatch": {"correction": correction, "low": 0.0, "high": 1.5}}
    algorithm, e = prepared(name, **block)
    assert e.old_logprobs is not None
    assert e.rollout_logprobs is not None
    ratio = (e.old_logprobs - e.rollout_logprobs).exp().clamp(max=1.5)
    if whole:  # one ratio a completion: what its tokens weigh is the mean of theirs
        for start, length in zip((0, 4, 9, 11), LENGTHS, strict=True):
            own = ratio[start : start + length]
            own[:] = own[e.loss_mask[start : start + length]].mean()
    plain = gradient(prepared(name)[0], e.old_logprobs, e)
    torch.testing.assert_close(gradient(algorithm, e.old_logprobs, e), ratio * plain)


@pytest.mark.parametrize("ratio_of", ["sequence", "geometric_mean"])
@CORRECTED
def test_a_correction_of_completions_weighs_all_their_tokens_alike(name: str, ratio_of: str) -> None:
    algorithm, e = prepared(name, mismatch={"correction": "truncate", "ratio_of": ratio_of, "low": 0.0, "high": 1.02})
    assert e.old_logprobs is not None
    factors = torch.zeros(len(MASK))
    for start, length in zip((0, 4, 9, 11), LENGTHS, strict=True):
        own = slice(start, start + length)
        difference = (e.old_logprobs - e.rollout_logprobs)[own][e.loss_mask[own]]
        of = difference.sum() if ratio_of == "sequence" else difference.mean()
        factors[own] = min(float(of.exp()), 1.02)
    plain = gradient(prepared(name)[0], e.old_logprobs, e)
    torch.testing.assert_close(gradient(algorithm, e.old_logprobs, e), factors * plain)


def test_what_a_run_needs() -> None:
    assert [name for name in NAMES if build_algorithm(rl_config(name)).uses_critic] == ["ppo"]
    assert [name for name in NAMES if build_algorithm(rl_config(name)).uses_teacher] == ["on-policy-distillation"]
    for name in NAMES:
        off = build_algorithm(rl_config(name))
        assert (off.uses_reference, off.kl_in_reward) == (False, False)
        on = build_algorithm(rl_config(name, kl={"coefficient": 0.1}))
        in_reward = name in ("ppo", "reinforce++", "rloo", "on-policy-distillation")
        assert (on.uses_reference, on.kl_in_reward) == (True, in_reward)
