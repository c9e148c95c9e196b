"""Metrics of `results.json` and of the manifest, computed from scored completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config.texts import is_blank
from rlhf_core.errors import one_line, shortened
from rlhf_core.evaluation.intervals import Estimate, cluster_bootstrap, wilson
from rlhf_core.evaluation.pass_at_k import pass_at_k

_SHOWN = 80  # characters of a text


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    text: str
    tokens: int
    finish_reason: str
    scores: dict[str, float]  # scorer -> 0-1; only 1 is a pass
    messages: Sequence[Mapping[str, Any]] | None = None  # that it answers, in a later turn of an episode


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt with its greedy completion and its sampled ones."""

    id: str
    task: str
    greedy: ScoredCompletion
    sampled: tuple[ScoredCompletion, ...]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Answered:
        """Restore it from the JSON values of `dataclasses.asdict`."""
        sampled = tuple(ScoredCompletion(**completion) for completion in row["sampled"])
        return cls(row["id"], row["task"], ScoredCompletion(**row["greedy"]), sampled)


def summarise(prompts: Sequence[Answered], *, pass_at: Sequence[int], seed: int) -> dict[str, Any]:
    """Return {"all": metrics, "tasks": {task: metrics}}, the content of `results.json`.

    Metrics are the number of `prompts`; of greedy and of sampled completions the mean `length` in tokens, the number of
    `blank` ones and the `finish_reasons`; `distinct_share`; and for each scorer pass@k, with 95 % intervals, and the
    mean scores.
    """
    tasks = sorted({prompt.task for prompt in prompts})
    return {
        "all": _metrics(prompts, pass_at, seed),
        "tasks": {task: _metrics([p for p in prompts if p.task == task], pass_at, seed) for task in tasks},
    }


def _metrics(prompts: Sequence[Answered], pass_at: Sequence[int], seed: int) -> dict[str, Any]:
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
        "blank": sum(is_blank(c.text) for c in completions),
        "finish_reasons": dict(sorted(Counter(c.finish_reason for c in completions).items())),
    }


def uniformity(greedy: Sequence[str], sampled: Sequence[str]) -> str:
    """Return a note if all completions, or all greedy ones, are blank or equal; else an empty string."""
    return _uniformity([*greedy, *sampled], "completions") or _uniformity(greedy, "greedy completions")


def _uniformity(texts: Sequence[str], what: str) -> str:
    if len(texts) < 2:
        return ""
    if all(is_blank(text) for text in texts):
        return f"all {len(texts)} {what} are blank: the model has not learned to answer, or ends its turn at once"
    same = len(set(texts)) == 1
    return f"all {len(texts)} {what} are the same: {shortened(one_line(texts[0]), _SHOWN)}" if same else ""


def _distinct_share(prompts: Sequence[Answered]) -> float:
    """Return the mean over prompts of the share of distinct texts among a prompt's sampled completions."""
    return sum(len({c.text for c in p.sampled}) / len(p.sampled) for p in prompts) / len(prompts)


def _scorer(prompts: Sequence[Answered], name: str, pass_at: Sequence[int], seed: int) -> dict[str, Any]:
    greedy = [prompt.greedy.scores[name] for prompt in prompts]
    sampled = [[completion.scores[name] for completion in prompt.sampled] for prompt in prompts]
    metrics: dict[str, Any] = {"mean_score": _mean(greedy), "passed": sum(map(_passes, greedy))}
    for k in pass_at:
        metrics[f"pass@{k}"] = asdict(_greedy_pass(greedy) if k == 1 else _sampled_pass(sampled, k, seed))
    if any(sampled):
        metrics["sampled_mean_score"] = _mean([_mean(scores) for scores in sampled])
        metrics["sampled_pass@1"] = asdict(_sampled_pass(sampled, 1, seed))
    return metrics


def _greedy_pass(scores: Sequence[float]) -> Estimate:
    return wilson(sum(map(_passes, scores)), len(scores))


def _sampled_pass(scores: Sequence[Sequence[float]], k: int, seed: int) -> Estimate:
    """Return the mean of the prompts' unbiased estimates, with its interval over prompts."""
    return cluster_bootstrap([pass_at_k(len(s), sum(map(_passes, s)), k) for s in scores], seed=seed)


def _passes(score: float) -> bool:
    return score == 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def flat_metrics(results: dict[str, Any], main_scorer: str) -> dict[str, float]:
    """Return the manifest's metrics: `pass@k`, `_low`, `_high` of the main scorer, `<scorer>/pass@k` of others."""
    overall = results["all"]
    metrics: dict[str, float] = {}
    for name, values in overall["scorers"].items():
        prefix = "" if name == main_scorer else f"{name}/"
        for metric, value in values.items():
            if metric.startswith("pass@"):
                metrics[f"{prefix}{metric}"] = value["value"]
                metrics[f"{prefix}{metric}_low"] = value["low"]
                metrics[f"{prefix}{metric}_high"] = value["high"]
        metrics[f"{prefix}mean_score"] = values["mean_score"]
    metrics["completion_length"] = overall["greedy"]["length"]
    if overall["distinct_share"] is not None:
        metrics["diversity"] = overall["distinct_share"]
    kinds = [kind for kind in (overall["greedy"], overall["sampled"]) if kind is not None]
    if blank := sum(kind["blank"] for kind in kinds):
        metrics["blank_share"] = blank / sum(kind["completions"] for kind in kinds)
    metrics["prompts"] = float(overall["prompts"])
    return metrics
