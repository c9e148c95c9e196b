"""Agreement of two judges on yes-or-no verdicts: its share, and Cohen's kappa, with intervals over rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_core.evaluation.intervals import Estimate, wilson

_RESAMPLES = 2000

Verdict = tuple[bool, bool]  # of the judge, and of people


@dataclass(frozen=True, slots=True)
class Agreement:
    """Verdicts of both, counted, and how far they agree."""

    rows: int
    both_met: int
    judge_alone: int  # met by the judge's verdict alone
    people_alone: int
    neither: int
    agreement: Estimate
    kappa: Estimate | None  # None: both gave one and the same verdict only, so that chance would agree as well

    @property
    def verdicts(self) -> int:
        return self.both_met + self.judge_alone + self.people_alone + self.neither


def agreement(rows: Iterable[Sequence[Verdict]], *, seed: int = 0) -> Agreement:
    """Compare the verdicts of each row. The intervals are of 95 %, over rows resampled with replacement: the verdicts
    of a row are not independent.

    Cohen's kappa (Educational and Psychological Measurement 20 (1960) 37-46) is (p - e) / (1 - e): p is the share of
    agreement, e that of two independent judges with the same shares of `met`. A resample without a kappa counts as 0.
    If all verdicts agree, so do those of all resamples; the lower ends are then those of Wilson's interval of the rows.
    Raises ValueError if there are no verdicts.
    """
    counts = np.array([_counts(row) for row in rows if row], dtype=np.float64).reshape(-1, 4)
    if not counts.size:
        raise ValueError("there are no verdicts to compare")
    observed = counts.sum(axis=0)
    share, expected = float(_share(observed)), float(_expected(observed))
    number = len(counts)
    generator = np.random.default_rng(seed)
    sums = np.array([counts[generator.integers(number, size=number)].sum(axis=0) for _ in range(_RESAMPLES)])
    if share == 1:
        low = wilson(number, number).low
        of_share = Estimate(1.0, low, 1.0)
        of_kappa = Estimate(1.0, (low - expected) / (1 - expected), 1.0) if expected < 1 else None
    else:
        of_share = _interval(share, _share(sums))
        of_kappa = _interval(_kappa(share, expected), np.nan_to_num(_kappa(_share(sums), _expected(sums))))
    both, judge, people, neither = (round(count) for count in observed)
    return Agreement(number, both, judge, people, neither, of_share, of_kappa)


def _counts(row: Sequence[Verdict]) -> list[int]:
    return [row.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]


def _share(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of agreement. counts: (…, 4), as in `_counts`."""
    share: NDArray[np.float64] = (counts[..., 0] + counts[..., 3]) / counts.sum(axis=-1)
    return share


def _expected(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    total = counts.sum(axis=-1)
    judge, people = (counts[..., 0] + counts[..., 1]) / total, (counts[..., 0] + counts[..., 2]) / total
    expected: NDArray[np.float64] = judge * people + (1 - judge) * (1 - people)
    return expected


def _kappa(share: NDArray[np.float64] | float, expected: NDArray[np.float64] | float) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((share - np.asarray(expected)) / (1 - np.asarray(expected)))


def _interval(value: NDArray[np.float64] | float, resampled: NDArray[np.float64]) -> Estimate:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(float(value), min(float(value), float(low)), max(float(value), float(high)))
