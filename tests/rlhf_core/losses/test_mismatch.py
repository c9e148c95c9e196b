from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_core.losses.mismatch import Correction, RatioOf, corrected, measure

# Two sequences of 3 tokens, each with its first token not sampled. w = old / rollout: 4, 1/4; 2, 1.
RATIOS = torch.tensor([7.0, 4.0, 0.25, 7.0, 2.0, 1.0])
ROLLOUT = torch.full((6,), -1.0)
OLD = ROLLOUT + RATIOS.log()
MASK = torch.tensor([False, True, True, False, True, True])
LENGTHS = torch.tensor([3, 3])
WEIGHTS = torch.tensor([0.0, 0.25, 0.25, 0.0, 0.5, 0.5])


def correct(
    old: Tensor, correction: Correction, low: float, high: float, rollout: Tensor = ROLLOUT
) -> tuple[list[bool], list[float]]:
    kept, weights = corrected(old, rollout, MASK, WEIGHTS, LENGTHS, correction=correction, low=low, high=high)
    return kept.tolist(), weights.tolist()


def test_the_mismatch_worked_by_hand() -> None:
    metrics = measure(OLD, ROLLOUT, MASK)
    assert metrics["rollout_mismatch"].value.item() == pytest.approx(2 * math.log(4) + math.log(2), abs=1e-6)
    assert metrics["rollout_mismatch_max"].value.item() == pytest.approx(math.log(4), abs=1e-6)
    expected = (4 - 1 - math.log(4)) + (0.25 - 1 + math.log(4)) + (2 - 1 - math.log(2)) + 0
    assert metrics["rollout_kl"].value.item() == pytest.approx(expected, abs=1e-6)


def test_the_mismatch_of_nothing_is_zero() -> None:
    assert all(metric.value.item() == 0 for metric in measure(OLD, ROLLOUT, torch.zeros_like(MASK)).values())


def test_the_measured_kl_is_that_of_engine_and_trainer() -> None:
    """In expectation over tokens that the engine samples: the sum over its distribution is the exact KL."""
    torch.manual_seed(0)
    engine, trainer = torch.randn(2, 9, dtype=torch.float64).log_softmax(-1)
    everything = torch.ones(1, dtype=torch.bool)
    expected = sum(
        p * measure(trainer[i : i + 1], engine[i : i + 1], everything)["rollout_kl"].value.item()
        for i, p in enumerate(engine.exp().tolist())
    )
    assert expected == pytest.approx((engine.exp() * (engine - trainer)).sum().item(), abs=1e-12)


def test_truncate_holds_the_ratio_between_its_bounds() -> None:
    kept, weights = correct(OLD, "truncate", 0.0, 2.0)
    assert kept == MASK.tolist()
    assert weights == pytest.approx([0, 2 * 0.25, 0.25 * 0.25, 0, 2 * 0.5, 0.5])
    assert correct(OLD, "truncate", 0.5, 5.0)[1] == pytest.approx([0, 1.0, 0.125, 0, 1.0, 0.5])


def test_token_filter_drops_what_is_outside_and_weighs_the_rest_by_the_ratio() -> None:
    kept, weights = correct(OLD, "token_filter", 0.5, 2.5)
    assert kept == [False, False, False, False, True, True]
    assert weights == pytest.approx([0, 0, 0, 0, 1.0, 0.5])


def test_sequence_filter_looks_at_the_geometric_mean_and_bounds_the_weights() -> None:
    # The geometric means are 1 and sqrt(2).
    kept, weights = correct(OLD, "sequence_filter", 0.9, 1.2)
    assert kept == [False, True, True, False, False, False]
    assert weights == pytest.approx([0, 1.2 * 0.25, 0.25 * 0.25, 0, 0, 0])
    assert correct(OLD, "sequence_filter", 1.3, 1.5)[0] == [False, False, False, False, True, True]


@pytest.mark.parametrize("correction", ["mask", "token_filter", "sequence_filter"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_dropped_token_is_gone_whatever_it_was(correction: Correction, bad: float) -> None:
    rollout = ROLLOUT.clone()
    rollout[1] = bad
    kept, weights = correct(OLD, correction, 0.5, 2.5, rollout)
    assert not kept[1]
    assert all(math.isfinite(weight) for weight in weights)
    assert weights[4:] == pytest.approx([1.0, 0.5])


def test_a_token_that_the_engine_thought_impossible_is_truncated_too() -> None:
    rollout = ROLLOUT.clone()
    rollout[1] = float("-inf")
    assert correct(OLD, "truncate", 0.0, 2.0, rollout)[1] == pytest.approx([0, 0.5, 0.0625, 0, 1.0, 0.5])


def test_no_correction_where_engine_and_trainer_agree() -> None:
    for correction in ("truncate", "mask", "token_filter", "sequence_filter"):
        assert correct(ROLLOUT, correction, 0.5, 2.0) == (MASK.tolist(), WEIGHTS.tolist())


RATIOS_OF: tuple[RatioOf, ...] = ("token", "sequence", "geometric_mean")
BY_CORRECTION: dict[str, tuple[Correction, float]] = {"mask": ("mask", 0.5), "clip": ("truncate", 0.5),
                                                      "truncate": ("truncate", 0.0)}  # fmt: skip


def in_plain_python(
    old: list[list[float]], rollout: list[list[float]], what: str, ratio_of: RatioOf, low: float, high: float
) -> tuple[list[bool], list[float]]:
    """Which tokens are kept, and their factors; every token is trained."""
    kept, factors = [], []
    for now, then in zip(old, rollout, strict=True):
        ratios = [math.exp(a) / math.exp(b) for a, b in zip(now, then, strict=True)]
        product = math.prod(ratios)
        for ratio in ratios:
            w = {"token": ratio, "sequence": product, "geometric_mean": product ** (1 / len(ratios))}[ratio_of]
            inside = low <= w <= high
            kept.append(what != "mask" or inside)
            bounded = {"mask": w if inside else 0.0, "clip": min(max(w, low), high), "truncate": min(w, high)}
            factors.append(bounded[what])
    return kept, factors


@pytest.mark.parametrize("ratio_of", RATIOS_OF)
@pytest.mark.parametrize("what", BY_CORRECTION)
def test_each_ratio_is_masked_clipped_and_truncated(what: str, ratio_of: RatioOf) -> None:
    noise = torch.Generator().manual_seed(5)
    lengths = [1, 2, 3, 5, 4, 1, 3]
    old = [(-torch.rand(length, generator=noise, dtype=torch.float64) * 3).tolist() for length in lengths]
    rollout = [[a + torch.randn((), generator=noise).item() for a in tokens] for tokens in old]
    correction, low = BY_CORRECTION[what]
    flat_old, flat_rollout = (torch.tensor([a for tokens in of for a in tokens]).double() for of in (old, rollout))
    kept, weights = corrected(
        flat_old, flat_rollout, torch.ones(sum(lengths), dtype=torch.bool),
        torch.full((sum(lengths),), 0.125, dtype=torch.float64), torch.tensor(lengths), correction=correction,
        ratio_of=ratio_of, low=low, high=2.0,
    )  # fmt: skip
    wanted = in_plain_python(old, rollout, what, ratio_of, low, 2.0)
    assert kept.tolist() == wanted[0]
    assert weights.tolist() == pytest.approx([0.125 * factor for factor in wanted[1]], rel=1e-6)
    assert 0 < sum(wanted[0]) <= sum(lengths)
    assert (sum(wanted[0]) < sum(lengths)) == (what == "mask")


def test_ratios_are_of_trained_tokens_alone() -> None:
    """w is 4 and 1/4, and 2 and 1: the products are 1 and 2, the geometric means 1 and the root of 2."""
    for ratio_of, second in (("sequence", 2.0), ("geometric_mean", 2**0.5)):
        _, weights = corrected(
            OLD, ROLLOUT, MASK, WEIGHTS, LENGTHS, correction="truncate", ratio_of=ratio_of, low=0.0, high=5.0
        )
        assert weights.tolist() == pytest.approx([0, 0.25, 0.25, 0, 0.5 * second, 0.5 * second])


def test_token_filter_is_mask_by_token() -> None:
    assert correct(OLD, "token_filter", 0.5, 2.5) == correct(OLD, "mask", 0.5, 2.5)


@pytest.mark.parametrize("ratio_of", RATIOS_OF)
def test_a_completion_that_the_engine_thought_impossible_is_dropped_or_bounded(ratio_of: RatioOf) -> None:
    rollout = ROLLOUT.clone()
    rollout[1:3] = float("-inf")
    of = {"mask": [False, False, False, False, True, True], "truncate": MASK.tolist()}
    for correction, kept in of.items():
        found, weights = corrected(
            OLD, rollout, MASK, WEIGHTS, LENGTHS, correction=correction, ratio_of=ratio_of, low=0.5, high=2.5
        )
        assert found.tolist() == kept
        assert weights.tolist()[1:3] == ([0.0, 0.0] if correction == "mask" else [0.625, 0.625])
