"""Rows and aggregates of lm-evaluation-harness in the form of an evaluation: scores by prompt, and intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhf_core.errors import StageError
from rlhf_core.evaluation.intervals import cluster_bootstrap

_Z = 1.959963984540054  # the normal distribution's 97.5 % quantile
_NO_NAME = re.compile(r"[^\w.-]")  # not in the name of a scorer
_SAME = 1e-9  # difference of two sums of the same numbers


def summarise(rows: Sequence[Mapping[str, Any]], aggregates: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the content of `results.json`: {"tasks": {task: {metric: …}}, "groups": …, "prompts", "truncated", …}.

    A metric has its `value`, by the harness. Where that is the mean of values of rows in 0-1 of which higher ones are
    better, `scores` is true and the interval is a bootstrap over rows; else it is the harness's standard error.
    Raises StageError if a task has no rows.
    """
    tasks = {}
    for task, of_harness in aggregates["tasks"].items():
        of_task = [row["values"] for row in rows if row["task"] == task]
        if not of_task:
            raise StageError(f"lm-evaluation-harness returned no rows of {task}")
        tasks[task] = dict(_metrics(of_harness, of_task, aggregates["higher_is_better"][task], seed))
    groups = {group: dict(_metrics(values, [], {}, seed)) for group, values in aggregates["groups"].items()}
    kept = {name: aggregates[name] for name in ("num_fewshot", "truncated")}
    return {"tasks": tasks, "groups": groups, "prompts": len(rows), **kept}


def _metrics(
    of_harness: Mapping[str, Any], rows: Sequence[Mapping[str, float | None]], better: Mapping[str, Any], seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each metric. of_harness: `METRIC,FILTER` -> value, `METRIC_stderr,FILTER` -> its standard error."""
    for key, value in of_harness.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = metric if filtered == "none" else f"{metric}.{filtered}"
        error = of_harness.get(f"{metric}_stderr,{filtered}")
        scores = [] if better.get(metric) is False else _scores([row.get(name) for row in rows], value)
        if scores:
            yield name, {"scores": True, **asdict(cluster_bootstrap(scores, seed=seed))}
        else:
            yield name, {"scores": False, "value": value, **_bounds(value, error)}


def _scores(values: Sequence[float | None], mean: float) -> list[float]:
    """Return the values if all are in 0-1 and have this mean, else none."""
    scores = [value for value in values if value is not None and 0 <= value <= 1]
    are_all = len(scores) == len(values) > 0 and abs(math.fsum(scores) / len(scores) - mean) < _SAME
    return scores if are_all else []


def _bounds(value: float, error: Any) -> dict[str, float | None]:
    """Return the interval of a standard error; without bounds if there is none."""
    if not isinstance(error, int | float) or not math.isfinite(error):
        return {"low": None, "high": None}
    return {"low": value - _Z * error, "high": value + _Z * error}


def sample_rows(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of `samples.jsonl`, as stages/evaluation.py writes them, with the requests of each row."""
    for row in rows:
        metrics = results["tasks"][row["task"]]
        scores = {
            scorer_name(row["task"], name): row["values"][name] for name, metric in metrics.items() if metric["scores"]
        }
        completion = {name: row[name] for name in ("text", "tokens", "finish_reason")}
        yield {
            **{name: row[name] for name in ("id", "prompt", "answer", "task")},
            "completions": [{**completion, "scores": scores}],
            "requests": row["requests"],
            "values": row["values"],
        }


def flat_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the manifest's metrics: `TASK.METRIC` with `_low` and `_high`, those of groups first."""
    metrics: dict[str, float] = {}
    for name, of_name in (*results["groups"].items(), *results["tasks"].items()):
        for metric, estimate in of_name.items():
            named = {"": estimate["value"], "_low": estimate["low"], "_high": estimate["high"]}
            metrics |= {scorer_name(name, metric) + end: value for end, value in named.items() if value is not None}
    if results["truncated"]:
        metrics["truncated_prompts"] = results["truncated"]
    metrics["prompts"] = results["prompts"]
    return metrics


def scorer_name(task: str, metric: str) -> str:
    return _NO_NAME.sub("_", f"{task}.{metric}")
