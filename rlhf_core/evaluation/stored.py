"""Evaluations as files, and the differences between two models of which the store has them."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.contract import Input
from rlhf_core.evaluation.comparison import scorers_of
from rlhf_core.evaluation.verdict import Comparison, Criterion, judge
from rlhf_core.tracking.protocol import SAMPLES_FILE, read_jsonl


def differences(repository: ArtifactRepository, baseline: ArtifactRef, candidate: ArtifactRef) -> Iterator[Comparison]:
    """Yield the difference of each scorer of each evaluation that both models have, the newest of each.

    Each is called as the evaluation's stage and the scorer. Evaluations that are not comparable are left out.
    """
    evaluations: dict[ArtifactRef | None, list[Manifest]] = {baseline: [], candidate: []}
    for manifest in repository.list_artifacts(Kind.EVALUATION):
        of = manifest.parents.get("model")
        if of in evaluations and manifest.kind == Kind.EVALUATION and repository.manifest(manifest.ref) is not None:
            evaluations[of].append(manifest)
    for listed in evaluations.values():
        listed.sort(key=lambda manifest: manifest.finished_at, reverse=True)
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as cache:
        for after, before in itertools.product(evaluations[candidate], evaluations[baseline]):
            for scorer in scorers(repository, after, Path(cache)):
                name = f"{after.name.partition('.')[0]}.{scorer}"
                if name in seen:
                    continue
                criterion = Criterion(name, scorer, "greedy", 0.0, strict=False)
                comparison = difference(repository, before, after, criterion, Path(cache))
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
