"""The page of a loop: its rounds side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundEnd
from rlhf_core.report.formatting import compared_metrics, visible, with_interval
from rlhf_core.report.templating import standalone
from rlhf_core.tracking.protocol import SAMPLES_FILE, read_jsonl

_SHOWN = ("reward", "best_reward", "kl")  # metrics of the stages that read the round's prompts, and of the candidate


@dataclass(frozen=True, slots=True)
class RoundRow:
    end: RoundEnd
    metrics: Mapping[str, str]  # by name, as they are shown
    answer: str  # the candidate's greedy completion of the page's prompt
    score: float | None


def page(repository: ArtifactRepository, title: str, ends: Sequence[RoundEnd]) -> str:
    """Render the page as HTML. Raises StoreError if artifacts of the rounds are gone."""
    prompt, rows = "", []
    for end in ends:
        sample: Mapping[str, Any] = {}
        metrics: Mapping[str, str] = {}
        if end.record is not None and (record := repository.manifest(end.record)) is not None:
            metrics = _metrics(repository, record)
            sample = _first_sample(repository, record)
            prompt = prompt or str(sample["prompt"])
        greedy = sample["completions"][0] if sample else None
        score = None if greedy is None else next(iter(greedy["scores"].values()), None)
        rows.append(RoundRow(end, metrics, "" if greedy is None else visible(greedy["text"]), score))
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    return standalone("rounds.html", {"title": title, "prompt": prompt, "rows": rows, "names": names})


def _metrics(repository: ArtifactRepository, record: Manifest) -> dict[str, str]:
    shown: dict[str, str] = {}
    for manifest in _sampled_or_trained(repository, record):
        shown |= {name: with_interval(manifest.metrics, name) for name in _SHOWN if name in manifest.metrics}
    evaluation = repository.manifest(record.parents["candidate_evaluation"])
    metrics = {} if evaluation is None else evaluation.metrics
    names = [name for name in compared_metrics({"": metrics}) if name != "prompts"]
    return shown | {name: with_interval(metrics, name) for name in names}


def _sampled_or_trained(repository: ArtifactRepository, record: Manifest) -> Iterator[Manifest]:
    """Yield the stages between the round's prompts and its candidate; those of earlier rounds are not read."""
    prompts, pending = record.parents["prompts"], [record.parents["candidate"]]
    seen = {record.parents["accepted"], prompts}
    while pending:
        ref = pending.pop()
        manifest = None if ref in seen else repository.stored_manifest(ref)
        seen.add(ref)
        if manifest is not None:
            pending += manifest.parents.values()
            if prompts in manifest.parents.values():
                yield manifest


def _first_sample(repository: ArtifactRepository, record: Manifest) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        folder = repository.fetch(record.parents["candidate_evaluation"], Path(cache), only=[SAMPLES_FILE])
        return read_jsonl(folder / SAMPLES_FILE)[0]
