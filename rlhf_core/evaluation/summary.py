"""Scored completions become the figures of `results.json` and of the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.evaluation.intervals import Estimate, cluster_bootstrap, wilson
from rlhf_core.evaluation.pass_at_k import pass_at_k


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    text: str
    tokens: int
    finish_reason: str
    scores: dict[str, float]  # scorer -> 0-1; 1 is a pass, anything less is none


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt with its greedy completion and its sampled ones."""

    id: str
    task: str
    greedy: ScoredCompletion
    sampled: tuple[ScoredCompletion, ...]


def summarise(prompts: Sequence[Answered], *, pass_at: Sequence[int], seed: int) -> dict[str, Any]:
    """{"all": figures, "tasks": {task: figures}}: as `results.json` keeps them.

    Figures have `prompts`; of greedy and sampled completions the mean `length` in tokens and the `finish_reasons`;
    `distinct_share`; and by scorer pass@k, each with its 95 % interval, and the mean scores.
    """
    tasks = sorted({prompt.task for prompt in prompts})
    return {
        "all": _figures(prompts, pass_at, seed),
        "tasks": {task: _figures([p for p in prompts if p.task == task], pass_at, seed) for task in tasks},
    }


def _figures(prompts: Sequence[Answered], pass_at: Sequence[int], seed: int) -> dict[str, Any]:
    sampled = [completion for prompt in prompts for completion in prompt.sampled]
    return {
        "prompts": len(prompts),
        "greedy": _lengths([prompt.greedy for prompt in prompts]),
        "sampled": _lengths(sampled) if sampled else None,
        "distinct_share": _distinct_share(prompts) if sampled else None,
        "scorers": {name: _scorer(prompts, name, pass_at, seed) for name in prompts[0].greedy.scores},
    }


def _lengths(completions: Sequence[ScoredCompletion]) -> dict[str, Any]:
    return {
        "completions": len(completions),
        "length": sum(c.tokens for c in completions) / len(completions),
        "finish_reasons": dict(sorted(Counter(c.finish_reason for c in completions).items())),
    }


def _distinct_share(prompts: Sequence[Answered]) -> float:
    """Mean over prompts of different texts among its sampled completions, divided by their number."""
    return sum(len({c.text for c in p.sampled}) / len(p.sampled) for p in prompts) / len(prompts)


def _scorer(prompts: Sequence[Answered], name: str, pass_at: Sequence[int], seed: int) -> dict[str, Any]:
    greedy = [prompt.greedy.scores[name] for prompt in prompts]
    sampled = [[completion.scores[name] for completion in prompt.sampled] for prompt in prompts]
    figures: dict[str, Any] = {"mean_score": _mean(greedy), "passed": sum(map(_passes, greedy))}
    for k in pass_at:
        figures[f"pass@{k}"] = asdict(_greedy_pass(greedy) if k == 1 else _sampled_pass(sampled, k, seed))
    if any(sampled):
        figures["sampled_mean_score"] = _mean([_mean(scores) for scores in sampled])
        figures["sampled_pass@1"] = asdict(_sampled_pass(sampled, 1, seed))
    return figures


def _greedy_pass(scores: Sequence[float]) -> Estimate:
    return wilson(sum(map(_passes, scores)), len(scores))


def _sampled_pass(scores: Sequence[Sequence[float]], k: int, seed: int) -> Estimate:
    """The unbiased estimate of each prompt, and their mean with its interval over prompts."""
    return cluster_bootstrap([pass_at_k(len(s), sum(map(_passes, s)), k) for s in scores], seed=seed)


def _passes(score: float) -> bool:
    return score == 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def flat_metrics(results: dict[str, Any], main_scorer: str) -> dict[str, float]:
    """The manifest's metrics: `pass@k` with `_low` and `_high` of the main scorer, `<scorer>/pass@k` of the others."""
    figures = results["all"]
    metrics: dict[str, float] = {}
    for name, values in figures["scorers"].items():
        prefix = "" if name == main_scorer else f"{name}/"
        for figure, value in values.items():
            if figure.startswith("pass@"):
                metrics[f"{prefix}{figure}"] = value["value"]
                metrics[f"{prefix}{figure}_low"] = value["low"]
                metrics[f"{prefix}{figure}_high"] = value["high"]
        metrics[f"{prefix}mean_score"] = values["mean_score"]
    metrics["completion_length"] = figures["greedy"]["length"]
    if figures["distinct_share"] is not None:
        metrics["diversity"] = figures["distinct_share"]
    metrics["prompts"] = float(figures["prompts"])
    return metrics
