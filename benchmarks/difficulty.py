"""Samples until a score with prompts chosen by pass rate: `python -m benchmarks.difficulty STORE`, after the runs.

The store has the results of `alignment run tiny-difficulty seed=S`, or of `alignment try tiny-difficulty
evaluation.by_difficulty seed=S` and `… evaluation.rl seed=S`. Both stages start from the same model and make as many
updates; the scores are those of their validations, and of the evaluations at their ends.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import store_figures
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.evaluation.comparison import compare
from rlhf_core.tracking.protocol import METRICS_FILE, SAMPLES_FILE

STAGES = ("rl", "by_difficulty")
_SCORE = "validation/mean_score"


def lines(repository: ArtifactRepository, manifest: Manifest, file: str, cache: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file of an artifact."""
    text = (repository.fetch(manifest.ref, cache, {file}) / file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def samples_and_scores(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return the completions sampled until each validation, and its score."""
    size = config[config["algorithm"]]["group_size"]
    curve, samples = [], 0
    for line in metrics:
        samples += int(size * (config["prompts_per_step"] - line.get("replay/prompts", 0)))
        if _SCORE in line:
            curve.append((samples, line[_SCORE]))
    return curve


def samples_until(curve: Sequence[tuple[int, float]], score: float) -> int | None:
    """Return the samples after which the score is reached, None if it is not."""
    return next((samples for samples, reached in curve if reached >= score), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--scores", type=float, nargs="+", default=[0.6, 0.8, 0.9])
    arguments = parser.parse_args()
    repository = ArtifactRepository(open_store(arguments.store))
    by_seed: dict[int, dict[str, Manifest]] = {}
    for manifest in repository.list_artifacts():
        if manifest.name in (*STAGES, *(f"evaluation.{stage}" for stage in STAGES)) and manifest.seed is not None:
            by_seed.setdefault(manifest.seed, {})[manifest.name] = manifest
    seeds = sorted(seed for seed, found in by_seed.items() if len(found) == 2 * len(STAGES))
    figures: dict[str, Any] = {stage: {} for stage in STAGES}
    differences = []
    with tempfile.TemporaryDirectory(prefix="difficulty-") as cache:
        for seed in seeds:
            found = by_seed[seed]
            for stage in STAGES:
                metrics = lines(repository, found[stage], METRICS_FILE, Path(cache))
                curve = samples_and_scores(metrics, found[stage].config)
                reached = {f"samples_until_{score:g}": samples_until(curve, score) for score in arguments.scores}
                score = found[f"evaluation.{stage}"].metrics["mean_score"]
                for name, value in {**reached, "samples": curve[-1][0], "score": score}.items():
                    figures[stage].setdefault(name, []).append(value)
            before, after = (lines(repository, found[f"evaluation.{s}"], SAMPLES_FILE, Path(cache)) for s in STAGES)
            differences.append(compare(before, after, "exact"))
    figures["difference"] = {
        "value": [round(each.value, 4) for each in differences],
        "low": [round(each.low, 4) for each in differences], "high": [round(each.high, 4) for each in differences],
    }  # fmt: skip
    table = Table("figure", *(f"seed {seed}" for seed in seeds))
    for stage, by_name in figures.items():
        for name, values in by_name.items():
            table.add_row(f"{stage}: {name}", *map(str, values))
    Console().print(table)
    store_figures(figures, seeds=seeds, command="alignment run tiny-difficulty seed=S")


if __name__ == "__main__":
    main()
