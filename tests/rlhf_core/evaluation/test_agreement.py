"""Agreement and kappa of two judges, against tables worked out by hand."""

from __future__ import annotations

import pytest

from rlhf_core.evaluation.agreement import Verdict, agreement
from rlhf_core.evaluation.intervals import wilson


def rows(both: int, judge: int, people: int, neither: int) -> list[list[Verdict]]:
    table = {(True, True): both, (True, False): judge, (False, True): people, (False, False): neither}
    return [[verdict] for verdict, count in table.items() for _ in range(count)]


@pytest.mark.parametrize(
    ("table", "share", "kappa"),
    [
        ((20, 5, 10, 15), 0.7, 0.4),  # by chance 0.5 * 0.6 + 0.5 * 0.4 = 0.5
        ((45, 15, 25, 15), 0.6, (0.6 - 0.54) / 0.46),  # by chance 0.6 * 0.7 + 0.4 * 0.3
        ((25, 35, 5, 35), 0.6, (0.6 - 0.46) / 0.54),  # by chance 0.6 * 0.3 + 0.4 * 0.7
        ((0, 10, 10, 0), 0.0, -1.0),
    ],
)
def test_kappa_of_a_table(table: tuple[int, int, int, int], share: float, kappa: float) -> None:
    found = agreement(rows(*table))
    assert (found.both_met, found.judge_alone, found.people_alone, found.neither) == table
    assert found.verdicts == found.rows == sum(table)
    assert found.kappa is not None
    assert (found.agreement.value, found.kappa.value) == pytest.approx((share, kappa))
    assert found.kappa.low <= kappa <= found.kappa.high


def test_the_interval_is_that_of_rows_and_not_of_verdicts() -> None:
    verdicts = [verdict for row in rows(20, 5, 10, 15) for verdict in row]
    alone = agreement([[verdict] for verdict in verdicts])
    repeated = agreement([[verdict] * 4 for verdict in verdicts])
    assert alone.kappa is not None
    assert repeated.kappa == alone.kappa
    assert repeated.verdicts == 200
    # The standard error of kappa by its large-sample formula, sqrt(p (1 - p) / n) / (1 - e), is 0.1296.
    assert (alone.kappa.high - alone.kappa.low) / (2 * 1.96) == pytest.approx(0.1296, rel=0.1)


def test_perfect_agreement_on_few_rows_has_a_wide_interval() -> None:
    found = agreement(rows(5, 0, 0, 5))
    low = wilson(10, 10).low  # 0.7225
    assert (found.agreement.low, found.agreement.high) == (low, 1.0)
    assert found.kappa is not None
    assert (found.kappa.value, found.kappa.low) == (1.0, pytest.approx((low - 0.5) / 0.5))


def test_a_single_verdict_of_both_has_no_kappa() -> None:
    found = agreement(rows(10, 0, 0, 0))
    assert (found.agreement.value, found.kappa) == (1.0, None)


def test_a_judge_that_says_yes_to_all_is_worth_nothing() -> None:
    found = agreement(rows(18, 2, 0, 0))
    assert found.agreement.value == 0.9
    assert found.kappa is not None
    assert (found.kappa.value, found.kappa.low) == (0.0, 0.0)


def test_rows_without_verdicts_are_an_error() -> None:
    with pytest.raises(ValueError, match="there are no verdicts to compare"):
        agreement([[]])
