"""Per-token advantages, computed without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from rlhf_core.types import sequence_ids

_VARIANCE_FLOOR = 1e-8
_STD_EPSILON = 1e-6
_SEQUENCES_OF_BLOCK = 1024

DivideByStd = bool | Literal["batch"]  # by the deviation of the group, or of all groups together


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, sequence_lengths: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, eq. 11-16 of arXiv:1506.02438, over the trained tokens of each sequence.

    rewards, values: (N,) float32, packed; mask: (N,) bool; sequence_lengths: (S,) int64, sums to N.
    The successor of a trained token is the next *trained* token: tokens of a prompt or an environment in between are
    not steps of the policy, so neither gamma nor lambda decays across them. The value after the last trained token is
    0. Rewards and values at tokens that are not trained are not read.
    Returns (advantages, returns), both (N,) and 0 where not trained; returns = advantages + values.
    """

    def block(rewards: Tensor, values: Tensor, mask: Tensor, sequence_lengths: Tensor) -> Tensor:
        order, sizes = _from_the_end(mask, sequence_lengths)
        errors, known = rewards[order], values[order]
        for error, next_value in zip(errors.split(sizes)[1:], known.split(sizes)[:-1], strict=True):
            error += gamma * next_value[: len(error)]
        errors -= known
        advantages = torch.zeros_like(values)
        advantages[order] = _discounted_sums(errors, sizes, gamma * lam)
        return advantages

    advantages = _in_blocks(block, (rewards, values, mask), sequence_lengths)
    return advantages, torch.where(mask, advantages + values, torch.zeros_like(values))


def _in_blocks(block: Callable[..., Tensor], of_tokens: Sequence[Tensor], sequence_lengths: Tensor) -> Tensor:
    """Return `block(*of_tokens, sequence_lengths)`, (N,), computed for some sequences at a time: tokens that a walk
    visits one after the other, each of another sequence, then stay in the processor's caches."""
    lengths = sequence_lengths.split(_SEQUENCES_OF_BLOCK)
    tokens = [int(each.sum()) for each in lengths]
    parts = zip(*(each.split(tokens) for each in of_tokens), lengths, strict=True)
    return torch.cat([block(*part) for part in parts])


def _from_the_end(mask: Tensor, sequence_lengths: Tensor) -> tuple[Tensor, list[int]]:
    """Order the trained tokens (M in all) by how many of their sequence follow, then by sequence, the longest first.

    The tokens with k + 1 to follow then precede those with k in the first sequences of these: the order of torch's
    PackedSequence, from the end. Returns their indices, (M,) int64, and the number of tokens with each k, from 0.
    """
    trained = mask.nonzero().squeeze(1)
    ends = torch.searchsorted(trained, sequence_lengths.cumsum(0))
    counts = ends.diff(prepend=ends.new_zeros(1))
    by_length = counts.argsort(descending=True, stable=True)
    sizes = len(counts) - torch.searchsorted(
        counts[by_length].flip(0), torch.arange(int(counts.max()), device=mask.device), right=True
    )
    following = torch.arange(len(sizes), device=mask.device).repeat_interleave(sizes)
    sequences = torch.arange(len(trained), device=mask.device) - (sizes.cumsum(0) - sizes)[following]
    return trained[(ends[by_length] - 1)[sequences] - following], sizes.tolist()


def _discounted_sums(terms: Tensor, sizes: list[int], factor: float) -> Tensor:
    """Return at each token the sum of its term and those that follow it in its sequence, each times factor ** distance.

    terms: (M,), ordered by `_from_the_end`, with its sizes.
    """
    sums = terms.clone()
    for later, step in pairwise(sums.split(sizes)):
        step += factor * later[: len(step)]
    return sums


@torch.no_grad()
def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages (N,) shifted and scaled to mean 0 and population variance 1 over all trained tokens; 0 elsewhere.

    Common in implementations of PPO (arXiv:2005.12729, section 3). The variance is at least 1e-8; equal advantages
    become exactly 0. Raises ValueError if no token is trained.
    """
    trained = advantages[mask]
    if not trained.numel():
        raise ValueError("advantages of no trained token cannot be whitened")
    if bool((trained == trained[0]).all()):
        return torch.zeros_like(advantages)  # else the division would magnify the rounding error of the mean
    centred = trained.double()
    centred -= centred.mean()
    variance = centred.square().mean()
    whitened = (centred * variance.clamp(min=_VARIANCE_FLOOR).rsqrt()).to(advantages.dtype)
    return torch.zeros_like(advantages).masked_scatter_(mask, whitened)


@torch.no_grad()
def group_normalised(rewards: Tensor, group_ids: Tensor, *, divide_by_std: DivideByStd = True) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation: section 4.1.2 of arXiv:2402.03300.

    rewards: (S,) float32, one per completion; group_ids: (S,) int64, equal for completions of one prompt, in any
    order. The paper does not specify the estimator: here it is the unbiased standard deviation plus 1e-6.
    divide_by_std=False omits the division (Dr. GRPO, arXiv:2503.20783); "batch" divides by the standard deviation of
    all `rewards` (Lite PPO, arXiv:2508.08221).
    Returns (S,) float32; exactly 0 for a group whose rewards are all equal, such as a group of one.
    """
    _, groups = torch.unique(group_ids, return_inverse=True)
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    # In float64, so that the mean of equal rewards equals that reward in all but pathological cases.
    exact = rewards.double()
    counts = torch.zeros(num_groups, dtype=exact.dtype, device=exact.device).index_add_(
        0, groups, torch.ones_like(exact)
    )
    means = torch.zeros_like(counts).index_add_(0, groups, exact) / counts
    centred = exact - means[groups]
    if divide_by_std == "batch":
        squares = (exact - exact.mean()).square().sum()
        centred = centred / ((squares / max(exact.numel() - 1, 1)).sqrt() + _STD_EPSILON)
    elif divide_by_std:
        squares = torch.zeros_like(counts).index_add_(0, groups, centred.square())
        deviations = (squares / (counts - 1).clamp(min=1)).sqrt()
        centred = centred / (deviations[groups] + _STD_EPSILON)
    lowest = torch.full_like(counts, torch.inf).scatter_reduce_(0, groups, exact, "amin")
    highest = torch.full_like(counts, -torch.inf).scatter_reduce_(0, groups, exact, "amax")
    all_equal = (lowest == highest)[groups]
    return torch.where(all_equal, torch.zeros_like(centred), centred).to(rewards.dtype)


@torch.no_grad()
def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean reward of the *other* completions of the prompt: RLOO, section 3 of arXiv:2402.14740.

    rewards: (S,) float32, one per completion; group_ids: (S,) int64, equal for completions of one prompt.
    Returns (S,) float32; exactly 0 for a group whose rewards are all equal. Raises ValueError for a group of one.
    """
    _, groups = torch.unique(group_ids, return_inverse=True)
    size = torch.bincount(groups)[groups].double()
    if bool((size < 2).any()):
        raise ValueError("leave-one-out needs at least two completions of each prompt")
    # n / (n - 1) x (reward - group mean) is the same value, and exact for equal rewards.
    centred = group_normalised(rewards.double(), group_ids, divide_by_std=False)
    return (centred * size / (size - 1)).to(rewards.dtype)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, sequence_lengths: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return at each trained token: the sum of the rewards at it and at the later trained tokens
    of its sequence, each discounted by gamma per trained token of distance.

    rewards: (N,) float32, not read where not trained; mask: (N,) bool; sequence_lengths: (S,) int64, sums to N.
    Returns (N,) float32, 0 where not trained.
    """

    def block(rewards: Tensor, mask: Tensor, sequence_lengths: Tensor) -> Tensor:
        order, sizes = _from_the_end(mask, sequence_lengths)
        returns = torch.zeros_like(rewards)
        returns[order] = _discounted_sums(rewards[order], sizes, gamma)
        return returns

    return _in_blocks(block, (rewards, mask), sequence_lengths)


@torch.no_grad()
def process_advantages(
    process_rewards: Tensor,
    step_ends: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    sequence_lengths: Tensor,
    *,
    divide_by_std: DivideByStd = True,
) -> Tensor:
    """Process supervision, section 4.1.3 of arXiv:2402.03300: the rewards of steps are normalised over all steps of all
    completions of a prompt; the advantage of a token is the sum over the steps that end at it or later.

    process_rewards: (N,) float32, read where `step_ends` (N,) bool is true, at the last token of each step; group_ids:
    (S,) int64; mask: (N,) bool; sequence_lengths: (S,) int64, sums to N. Normalised as in `group_normalised`.
    Steps that end at a token that is not trained are ignored. Returns (N,) float32, 0 where not trained.
    """
    step_ends = step_ends & mask
    groups_of_steps = group_ids[sequence_ids(sequence_lengths)][step_ends]
    normalised = torch.zeros_like(process_rewards)
    normalised[step_ends] = group_normalised(process_rewards[step_ends], groups_of_steps, divide_by_std=divide_by_std)
    return discounted_returns(normalised, mask, sequence_lengths, gamma=1.0)


def broadcast_to_tokens(per_sequence: Tensor, mask: Tensor, sequence_lengths: Tensor) -> Tensor:
    """Copy the value of each sequence (S,) to its trained tokens; return (N,), 0 where `mask` (N,) bool is false."""
    per_token = per_sequence[sequence_ids(sequence_lengths)]
    return torch.where(mask, per_token, torch.zeros_like(per_token))
