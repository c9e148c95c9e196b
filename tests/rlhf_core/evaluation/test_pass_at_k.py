from __future__ import annotations

from itertools import combinations
from math import comb

import pytest

from rlhf_core.evaluation.pass_at_k import pass_at_k


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_it_is_the_share_of_all_subsets_that_have_a_pass(samples: int) -> None:
    for passed in range(samples + 1):
        outcomes = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_values_computed_by_hand() -> None:
    assert pass_at_k(8, 2, 1) == pytest.approx(0.25)
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70)
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - comb(197, 100) / comb(200, 100))


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_impossible_counts_are_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(samples, passed, k)
