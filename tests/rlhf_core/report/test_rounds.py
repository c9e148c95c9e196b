"""The page of a loop: what it says of each round, from artifacts in a store."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundEnd
from rlhf_core.report.rounds import page
from tests.rlhf_core.artifacts.manifests import manifest

ENDED = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


class Artifacts:
    """Written to a store, each with a key of its own."""

    def __init__(self, folder: Path) -> None:
        self.repository = ArtifactRepository(LocalStore(folder / "store"))
        self._folder, self._count = folder, 0

    def make(self, kind: Kind, parents: dict[str, ArtifactRef], sample: object = None, **metrics: float) -> ArtifactRef:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
        made = manifest(str(self._count), kind.value, kind=kind, parents=parents, metrics=metrics)
        return self.repository.publish(made, folder).ref


def round_of(
    made: Artifacts, number: int, accepted: ArtifactRef, answer: str, score: float, verdict: Any, *, reward: float
) -> RoundEnd:
    """Prompts, what was sampled of them, pairs, a candidate trained on these, its evaluation, and the record."""
    prompts = made.make(Kind.DATASET, {})
    sampled = made.make(Kind.DATASET, {"model": accepted, "prompts": prompts}, reward=reward, kl=0.25, rows=9.0)
    pairs = made.make(Kind.DATASET, {"completions": sampled}, reward=-99.0)
    candidate = made.make(Kind.POLICY, {"model": accepted, "dataset": pairs})
    sample = {"id": "a", "prompt": "<b>2 + 2</b>", "completions": [{"text": answer, "scores": {"exact": score}}]}
    evaluation = made.make(
        Kind.EVALUATION, {"model": candidate}, sample,
        **{"pass@1": score, "pass@1_low": score - 0.125, "pass@1_high": score + 0.125, "prompts": 40.0},
    )  # fmt: skip
    parents = {"prompts": prompts, "accepted": accepted, "candidate": candidate, "candidate_evaluation": evaluation}
    record = made.make(Kind.ROUND, parents)
    return RoundEnd(
        number=number, verdict=verdict, reason=f"because of {number}", record=record, candidate=candidate,
        prompts=prompts, ended_at=ENDED, run_id="r",
    )  # fmt: skip


def table(html: str) -> dict[str, list[str]]:
    """The rows of the page's table: what the first cell says -> the others."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    cells = [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row, re.DOTALL)]
        for row in rows
    ]
    return {first: others for first, *others in cells}


@pytest.fixture
def made(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path)


def test_rounds_stand_side_by_side(made: Artifacts) -> None:
    start = made.make(Kind.POLICY, {})
    first = round_of(made, 1, start, "3", 0.25, "accepted", reward=0.5)
    assert first.candidate is not None
    second = round_of(made, 2, first.candidate, "<i>4</i>", 1.0, "refused", reward=0.75)
    skipped = RoundEnd(
        number=3, verdict="skipped", reason="no prompts", record=None, candidate=None, prompts=first.prompts,
        ended_at=ENDED, run_id="r",
    )  # fmt: skip
    html = page(made.repository, "my loop", [first, second, skipped])
    assert "<i>4</i>" not in html
    assert table(html) == {
        "round": ["1", "2", "3"],
        "verdict": ["accepted", "refused", "skipped"],
        "why": ["because of 1", "because of 2", "no prompts"],
        # Of what read the round's prompts; not of the pairs made of it, nor of the rounds before.
        "reward": ["0.500", "0.750", "–"],
        "kl": ["0.250", "0.250", "–"],
        "pass@1": ["0.250 (0.125–0.375)", "1 (0.875–1.125)", "–"],
        "candidate": [str(first.candidate), str(second.candidate), ""],
        "ended": ["2026-01-02 03:04"] * 3,
        "&lt;b&gt;2 + 2&lt;/b&gt;": ["3", "&lt;i&gt;4&lt;/i&gt;", ""],
    }
