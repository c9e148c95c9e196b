"""Evaluations as files, and the differences between two models of which the store has them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.contract import Input
from rlhf_core.evaluation.comparison import scorers_of
from rlhf_core.evaluation.verdict import Comparison, Criterion, judge
from rlhf_core.tracking.protocol import SAMPLES_FILE, read_jsonl

EVALUATING = ("evaluation", "benchmark")  # stages whose results are evaluations of a model


def evaluations_of(
    repository: ArtifactRepository, models: Collection[ArtifactRef], manifests: Iterable[Manifest] | None = None
) -> list[Manifest]:
    """Return the whole evaluations of models, the newest first. manifests: of evaluations; None: all of the store."""
    if manifests is None:
        manifests = itertools.chain.from_iterable(map(repository.list_artifacts, EVALUATING))
    found = [
        manifest
        for manifest in manifests
        if manifest.kind == Kind.EVALUATION
        and manifest.parents.get("model") in models
        and repository.manifest(manifest.ref) is not None
    ]
    return sorted(found, key=lambda manifest: manifest.finished_at, reverse=True)


def differences(
    repository: ArtifactRepository, baseline: ArtifactRef, candidate: ArtifactRef, evaluations: Sequence[Manifest],
    cache: Path,
) -> Iterator[Comparison]:  # fmt: skip
    """Yield the difference of each scorer of each evaluation that both models have, the newest of each.

    Each is called as the evaluation's stage and the scorer. Evaluations that are not comparable are left out.
    evaluations: of both models, the newest first. cache: a folder for their files.
    """
    old, new = ([each for each in evaluations if each.parents["model"] == of] for of in (baseline, candidate))
    seen: set[str] = set()
    for after, before in itertools.product(new, old):
        for scorer in scorers(repository, after, cache):
            name = f"{after.name.partition('.')[0]}.{scorer}"
            if name in seen:
                continue
            criterion = Criterion(name, scorer, "greedy", 0.0, strict=False)
            comparison = difference(repository, before, after, criterion, cache)
            if comparison is not None:
                seen.add(name)
                yield comparison


def write_evaluation(folder: Path, results: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> None:
    """Write `results.json`, and `samples.jsonl` with a line for each prompt, to a new folder."""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with (folder / SAMPLES_FILE).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)


def scorers(repository: ArtifactRepository, evaluation: Manifest, cache: Path) -> list[str]:
    """Return the names of an evaluation's scorers, the main one first. cache: a folder for its files."""
    if named := evaluation.config.get("scorers"):
        return list(named)
    return scorers_of(read_jsonl(repository.fetch(evaluation.ref, cache, only=[SAMPLES_FILE]) / SAMPLES_FILE))


def difference(
    repository: ArtifactRepository, before: Manifest, after: Manifest, criterion: Criterion, cache: Path
) -> Comparison | None:
    """Return the difference of two evaluations; None if they have other prompts, or are scored otherwise.

    cache: a folder for their files.
    """
    old, new = (
        Input(each, repository.fetch(each.ref, cache, only=[SAMPLES_FILE])) for each in (before, after)
    )  # fmt: skip
    try:
        return judge(old, new, criterion)
    except ValueError:
        return None
