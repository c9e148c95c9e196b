"""Paired comparison of two models' scores on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.config.stages.benchmark import HARNESS
from rlhf_core.config.stages.evaluation import Completions
from rlhf_core.evaluation.intervals import Estimate, paired_difference

_OPERATION = ("rollout", "models", "requests_per_call", "checkpoint", "stage", "seed")  # of benchmarks: no conditions


def compare(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    scorer: str,
    completions: Completions = "greedy",
) -> Estimate:
    """Return the mean score of `after` minus that of `before`, with its 95 % interval over prompts.

    before, after: rows of `samples.jsonl` of two evaluations (stages/evaluation.py).
    completions: the score of each prompt's greedy completion, or the mean score of its sampled ones.
    Raises ValueError if their prompts or the expected answers differ, or there are no such scores.
    """
    old, new = _scores(before, scorer, completions), _scores(after, scorer, completions)
    if old.keys() != new.keys() or questions(before) != questions(after):
        raise ValueError("the two evaluations have different prompts, so their scores cannot be compared")
    if not old:
        raise ValueError("the two evaluations have no prompts")
    return paired_difference(list(old.values()), [new[prompt] for prompt in old], seed=0)


def require_comparable(before: Manifest, after: Manifest, scorer: str) -> None:
    """Raise ValueError, in one sentence, if two evaluations scored differently. `compare` looks at their prompts."""
    mine, other = _conditions(before, scorer), _conditions(after, scorer)
    differing = [name for name in mine | other if mine.get(name) != other.get(name)]
    if differing:
        raise ValueError(
            f"the evaluations {before.ref} and {after.ref} have different {', '.join(differing)}, so their scores "
            f"cannot be compared"
        )


def _conditions(evaluation: Manifest, scorer: str) -> dict[str, Any]:
    """Return what the scores of an evaluation depend on beside the model and the prompts."""
    scorers = evaluation.config.get("scorers", {})
    return {
        **_conditions_of_benchmark(evaluation),
        f"scorers ({scorer})": scorers.get(scorer),
        "models that judge": {k: ref for k, ref in evaluation.parents.items() if k not in ("model", "dataset")},
        "sampling": evaluation.config.get("sampling"),
        "environments": evaluation.config.get("environment"),
        "user files": evaluation.user_files,
    }


def _conditions_of_benchmark(evaluation: Manifest) -> dict[str, Any]:
    config = evaluation.config
    if "tasks" not in config:
        return {}
    settings = {name: value for name, value in config.items() if name not in _OPERATION}
    length = config["rollout"]["max_length"] if config["long_prompts"] == "truncate" else None
    return {"settings": settings | {"max_length": length}, HARNESS: evaluation.libraries.get(HARNESS)}


def scorers_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all scores, in order; a benchmark's rows have those of their tasks."""
    return list(dict.fromkeys(name for row in rows for name in row["completions"][0]["scores"]))


def questions(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return prompt and expected answer of each row, by its id."""
    return {row["id"]: (row.get("prompt"), row.get("answer")) for row in rows}


def _scores(rows: Sequence[Mapping[str, Any]], scorer: str, completions: Completions) -> dict[str, float]:
    """Return the score of each prompt that has one, by its id. Raises ValueError if none has."""
    scores = {}
    for row in rows:
        greedy, *sampled = row["completions"]
        chosen = [greedy] if completions == "greedy" else sampled
        if not chosen:
            raise ValueError("the evaluation has no sampled completions: raise its `samples`, or compare greedy ones")
        if scorer in greedy["scores"]:
            scores[row["id"]] = sum(completion["scores"][scorer] for completion in chosen) / len(chosen)
    if rows and not scores:
        raise ValueError(f"the evaluation has no scorer `{scorer}`; it has {', '.join(scorers_of(rows))}")
    return scores
