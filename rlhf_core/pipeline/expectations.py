"""Expected time and cost of a stage, by earlier results of the store.

A result counts if it is of the same type of stage, of a model with as many parameters (to 5 %), on the same kind of
device, GPU or CPU, with as many of them reserved. Each gives seconds and money per token, else per step, else for the
whole, whichever of these are known of both. Expected is the median. The interval leaves out the k lowest and k highest
of n results, k = (n + 1) / 20 - 1 rounded down: the next result, if it is drawn like them, is in it with a probability
of 90 %, or of (n - 1) / (n + 1) below 19 results. A single result has no spread: half to twice is a convention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import attempt_of
from rlhf_core.artifacts.costs import cost_of
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.config.prices import PricesConfig

_SAME_SIZE = 0.05
_OUTSIDE = 20  # of so many results, one is left out at each end


@dataclass(frozen=True, slots=True)
class Range:
    expected: float
    low: float
    high: float
    results: int  # that it was learned from

    def __add__(self, other: Range) -> Range:
        """Return the range of a sum, as if all were low, or high, together."""
        least = min(self.results, other.results)
        return Range(self.expected + other.expected, self.low + other.low, self.high + other.high, least)


def range_of(values: Sequence[float]) -> Range:
    """Return the range of positive values, of which there is at least one; see the module's docstring."""
    ordered = sorted(values)
    if len(ordered) == 1:
        return Range(ordered[0], ordered[0] / 2, ordered[0] * 2, 1)
    left_out = max(0, (len(ordered) + 1) // _OUTSIDE - 1)
    return Range(median(ordered), ordered[left_out], ordered[-1 - left_out], len(ordered))


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a stage. None: not known, or it has none of it."""

    parameters: int | None  # of its model
    reserved: Reservation
    tokens: float | None
    steps: float | None


@dataclass(frozen=True, slots=True)
class Expectation:
    seconds: Range
    money: Range | None  # None: without prices


class History:
    """The results of a store, as far as they teach something about time."""

    def __init__(self, results: Iterable[Manifest]) -> None:
        self._by_ref: dict[ArtifactRef, Manifest] = {manifest.ref: manifest for manifest in results}

    def expect(self, stage: str, work: Work, prices: PricesConfig | None) -> Expectation | None:
        """Return the expectation; None if no result of the store counts."""
        alike = [m for m in self._by_ref.values() if m.stage == stage and self._is_alike(m, work)]
        rates = [rate for manifest in alike if (rate := _rate(manifest, work)) is not None]
        if not rates:
            return None
        seconds = range_of([share * attempt.seconds for share, attempt in rates])
        if prices is None:
            return Expectation(seconds, None)
        return Expectation(seconds, range_of([share * cost_of([attempt], prices).money for share, attempt in rates]))

    def _is_alike(self, manifest: Manifest, work: Work) -> bool:
        attempt = attempt_of(manifest)
        if (attempt.gpus > 0) != (work.reserved.gpus > 0):
            return False
        if manifest.attempts and (attempt.gpus, attempt.cores) != (work.reserved.gpus, work.reserved.cpus):
            return False
        parameters = self._parameters(manifest)
        if parameters is None or work.parameters is None:
            return parameters is work.parameters
        return abs(parameters - work.parameters) <= _SAME_SIZE * work.parameters

    def _parameters(self, manifest: Manifest) -> int | None:
        """Return the number of parameters of the base model that it goes back to."""
        seen = set[ArtifactRef]()
        while (ref := manifest.parents.get("model")) in self._by_ref and ref is not None and ref not in seen:
            seen.add(ref)
            manifest = self._by_ref[ref]
        counted = manifest.metrics.get("parameters")
        return counted if isinstance(counted, int) else None


def _rate(manifest: Manifest, work: Work) -> tuple[float, Attempt] | None:
    """Return the work as a multiple of what the manifest's last attempt did, and that attempt."""
    attempt = attempt_of(manifest)
    if attempt.seconds <= 0:
        return None
    steps = _number(manifest.metrics, "steps") or _number(manifest.config, "steps") or attempt.step
    done = 1.0
    if attempt.resumed_after and steps:
        done = max(0.0, steps - attempt.resumed_after) / steps
    tokens = _number(manifest.metrics, "tokens")
    for wanted, had in ((work.tokens, tokens), (work.steps, steps)):
        if wanted and had:
            return (wanted / (had * done), attempt) if done > 0 else None
    return (1.0, attempt) if work.steps is None and done == 1.0 else None


def _number(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
