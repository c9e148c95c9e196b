"""95 % confidence intervals: the variation of an evaluation's metrics over other prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054  # the normal distribution's 97.5 % quantile
_VALUES_AT_ONCE = 2**20  # of resamples that are drawn by one call, which bounds their memory


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float


def wilson(passed: int, count: int) -> Estimate:
    """Return the share of `count` independent prompts that passed, with its interval.

    E. B. Wilson, JASA 22 (1927) 209-212. Unlike the normal approximation it stays inside 0-1, and has a width if all or
    none passed.
    """
    if not 0 <= passed <= count or count == 0:
        raise ValueError(f"{passed} of {count} passed")
    share = passed / count
    scale = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    # If all or none passed, the exact bound is 0 or 1; rounding must not put the share outside its interval.
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def cluster_bootstrap(values: Sequence[float], *, seed: int, resamples: int = 2000) -> Estimate:
    """Return the mean of one value in 0-1 per prompt, with the percentile interval over prompts resampled with
    replacement.

    A value may come from many samples of its prompt. These are not independent, so whole prompts are resampled.
    Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.8.
    The same seed gives the same bounds.

    If all n values equal v, so do all resamples, though other prompts might differ. None of n prompts did, so the share
    q of all prompts that differ is at most Wilson's bound for 0 of n; their values are in 0-1, and the overall mean is
    in [v - q v, v + q (1 - v)]. At 0 and 1 this is Wilson's interval.
    """
    if not values:
        raise ValueError("there are no values to take a mean of")
    if not all(0 <= value <= 1 for value in values):
        raise ValueError("a value is outside 0-1")
    data = np.asarray(values, dtype=np.float64)
    if (data == data[0]).all():
        value, different = float(data[0]), wilson(0, data.size).high
        return Estimate(value, value - different * value, value + different * (1 - value))
    return bootstrap(values, seed=seed, resamples=resamples)


def bootstrap(values: Sequence[float], *, seed: int, resamples: int = 2000) -> Estimate:
    """Return the mean of one unbounded value per prompt, with the interval of `cluster_bootstrap`.

    For equal values it has no width: there is no bound on the values of other prompts.
    """
    data = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    at_once = max(1, _VALUES_AT_ONCE // data.size)
    counts = [min(at_once, resamples - done) for done in range(0, resamples, at_once)]
    means = np.concatenate([generator.choice(data, size=(count, data.size)).mean(axis=1) for count in counts])
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(data.mean()), float(low), float(high))


def paired_difference(before: Sequence[float], after: Sequence[float], *, seed: int) -> Estimate:
    """Return the mean of after - before, values in 0-1 of the same prompts, with its interval by `cluster_bootstrap`.

    Resampling prompts keeps each pair together, so the difficulty of a prompt for both does not widen the interval.
    """
    shares = [(new - old + 1) / 2 for old, new in zip(before, after, strict=True)]
    share = cluster_bootstrap(shares, seed=seed)
    return Estimate(2 * share.value - 1, 2 * share.low - 1, 2 * share.high - 1)
