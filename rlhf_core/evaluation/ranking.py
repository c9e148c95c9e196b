"""Accuracy, margin and calibration of rewards on completions of which it is known that some are better than others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.evaluation.intervals import bootstrap, wilson

_BINS = 10  # of the confidence, from 1/2 to 1


@dataclass(frozen=True, slots=True)
class Ranked:
    """The rewards of a prompt's completions."""

    subset: str
    chosen: Sequence[float]
    rejected: Sequence[float]

    @property
    def is_right(self) -> bool:
        """Return whether every chosen completion has a higher reward than every rejected one; a tie is wrong."""
        return min(self.chosen) > max(self.rejected)

    @property
    def margins(self) -> list[float]:
        """Reward of the chosen completion minus that of the rejected one, of each pair."""
        return [better - worse for better in self.chosen for worse in self.rejected]


def rank(rows: Sequence[Ranked], seed: int) -> dict[str, Any]:
    """Return {"all": metrics, "subsets": {subset: metrics}}.

    Metrics are the number of `prompts`, `pairs` and `ties` of pairs; `accuracy` with Wilson's interval; the mean
    `margin` with its bootstrap interval over prompts; `log_loss`, the mean of -log sigmoid(margin) over pairs, in nats;
    `ece`, and the `reliability` that it is computed from.
    """
    subsets = dict.fromkeys(row.subset for row in rows)
    return {
        "all": _metrics(rows, seed),
        "subsets": {subset: _metrics([row for row in rows if row.subset == subset], seed) for subset in subsets},
    }


def _metrics(rows: Sequence[Ranked], seed: int) -> dict[str, Any]:
    margins = [margin for row in rows for margin in row.margins]
    bins = list(reliability(margins))
    return {
        "prompts": len(rows),
        "pairs": len(margins),
        "ties": sum(margin == 0 for margin in margins),
        "accuracy": asdict(wilson(sum(row.is_right for row in rows), len(rows))),
        "margin": asdict(bootstrap([math.fsum(row.margins) / len(row.margins) for row in rows], seed=seed)),
        "log_loss": math.fsum(_softplus(-margin) for margin in margins) / len(margins),
        "ece": math.fsum(each["pairs"] * abs(each["right"] - each["confidence"]) for each in bins) / len(margins),
        "reliability": bins,
    }


def reliability(margins: Sequence[float]) -> Iterator[dict[str, float]]:
    """Yield the bins of equal width that have pairs: their `pairs`, mean `confidence`, and share that is `right`.

    A Bradley-Terry model prefers the completion with the higher reward with the probability sigmoid(|margin|), its
    confidence. The expected calibration error (arXiv:1706.04599, eq. 3) is the mean distance of the last two. A tie is
    half right.
    """
    binned: list[list[tuple[float, float]]] = [[] for _ in range(_BINS)]
    for margin in margins:
        confidence = math.exp(-_softplus(-abs(margin)))
        right = 0.5 if margin == 0 else float(margin > 0)
        binned[min(int((confidence - 0.5) * 2 * _BINS), _BINS - 1)].append((confidence, right))
    for each in binned:
        if each:
            confidences, right_ones = zip(*each, strict=True)
            yield {
                "pairs": len(each),
                "confidence": math.fsum(confidences) / len(each),
                "right": math.fsum(right_ones) / len(each),
            }


def _softplus(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def flat_metrics(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the manifest's metrics of the results by reward: `accuracy`, `margin`, `ece`, … of the first, `NAME/…` of
    others, and `accuracy/SUBSET`, with `_low` and `_high`.
    """
    metrics: dict[str, float] = {}
    for number, (name, result) in enumerate(results.items()):
        prefix = f"{name}/" if number else ""
        overall, subsets = result["all"], result["subsets"]
        metrics |= _with_bounds(f"{prefix}accuracy", overall["accuracy"])
        metrics |= _with_bounds(f"{prefix}margin", overall["margin"])
        metrics |= {f"{prefix}{metric}": overall[metric] for metric in ("ece", "log_loss", "ties")}
        for subset, of_subset in subsets.items() if len(subsets) > 1 else ():
            metrics |= _with_bounds(f"{prefix}accuracy/{subset}", of_subset["accuracy"])
        if len(subsets) > 1:
            means = [of_subset["accuracy"]["value"] for of_subset in subsets.values()]
            metrics[f"{prefix}accuracy_of_subsets"] = math.fsum(means) / len(means)
    return metrics


def _with_bounds(name: str, estimate: Mapping[str, float]) -> dict[str, float]:
    return {name: estimate["value"], f"{name}_low": estimate["low"], f"{name}_high": estimate["high"]}
