"""The page of a loop: each round with its verdict, its scores and its cost, the newest first."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deployments.ui.demo import write_demo
from deployments.ui.loops import read_loop
from deployments.ui.reading import StoreReader
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository, manifest_path
from rlhf_core.artifacts.rounds import Rounds
from tests.deployments.ui.served import browsing, data_of

pytestmark = pytest.mark.parts


@contextmanager
def demo(folder: Path, runs: int) -> Iterator[tuple[httpx.Client, LocalStore]]:
    """A server of the demo's store, whose loop `nightly` has as many rounds."""
    store = LocalStore(folder / "store")
    write_demo(ArtifactRepository(store), runs=runs, steps=2)
    with browsing(store, folder / "cache") as client:
        yield client, store


def test_a_loop_shows_each_round_against_the_accepted_and_against_the_start(
    tmp_path: Path,
) -> None:
    with demo(tmp_path, runs=2) as (browser, store):
        page = browser.get("/loops/nightly").text
        loops = browser.get("/loops").text
        last = Rounds(store, "nightly").ends()[-1]
        made = f'<a href="/runs/{last.run_id}/rl">{last.candidate}</a>'
        assert f'<td class="nowrap">{made}</td>' in page
        assert '<a href="/loops/nightly">nightly</a>' in loops
        assert f'<td class="number"><a href="/runs/{last.run_id}">2</a></td>' in loops
        assert '<span class="succeeded">accepted</span>' in loops
        assert f'<td class="nowrap">{last.ended_at:%Y-%m-%d %H:%M} UTC</td>' in loops
        assert browser.get("/loops/none").status_code == 404
        assert browser.get("/loops/..%2f..").status_code == 404
    scores = [
        node.metrics["exact"]
        for seed in (0, 1)
        for run in StoreReader(ArtifactRepository(store), Path("unused")).runs()
        if run.name == "sums" and run.recipe["seed"] == seed and run.record is not None
        for node in run.record.nodes
        if node.name in ("evaluation.rl", *(["evaluation.base"] if seed == 0 else []))
    ]
    start, first, second = (float(str(score)) for score in scores)
    assert f"Round 2 was accepted: exact {second:.3f}, before {first:.3f}" in page
    gains = re.findall(r"<span[^>]*>([+-]\d\.\d{3})</span>", page)
    assert gains == [f"{gain:+.3f}" for gain in (second - first, second - start, first - start, first - start)]
    assert (
        "2 rounds took 0.15 device hours" in page
    )  # a minute for each of five stages, and of four that the second computed
    assert 'cost <span class="quiet">no prices set</span></th>' in page
    charts = data_of(page, "charts")["charts"]
    assert [chart["x"] for chart in charts] == ["round", "round"]
    assert [(chart["title"], chart["lines"][-1]["x"]) for chart in charts] == [
        ("score", [1, 2]), ("against the start", [1, 2])
    ]  # fmt: skip


def test_a_round_that_has_not_ended_leads_its_loop(tmp_path: Path) -> None:
    with demo(tmp_path, runs=3) as (browser, store):
        rounds = Rounds(store, "nightly")
        rounds.start(rounds.current("a run"))
        page = browser.get("/loops/nightly").text
        assert '<span class="running">unfinished</span>' in browser.get("/loops").text
    assert "Round 4 is unfinished: the next run of the loop finishes it" in page
    assert 'http-equiv="refresh"' in page


def test_differences_are_those_of_the_verdict_and_else_computed_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    repository = ArtifactRepository(store)
    write_demo(repository, runs=2, steps=2)
    last = Rounds(store, "nightly").ends()[-1].record
    assert last is not None
    record = repository.stored_manifest(last)
    assert record is not None
    judged = record.model_copy(update={"metrics": record.metrics | {"difference": 0.987}})
    store.put(manifest_path(last), judged.model_dump_json().encode())
    with browsing(store, tmp_path / "cache") as browser:
        page = browser.get("/loops/nightly").text
        shutil.rmtree(tmp_path / "cache")
        shutil.rmtree(tmp_path / "store" / "blobs")
        again = browser.get("/loops/nightly").text
    assert "+0.987</span>" in page
    assert again == page


def test_the_record_of_each_round_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "store")
    write_demo(ArtifactRepository(store), runs=3, steps=2)
    read: Counter[str] = Counter()
    get_tagged = LocalStore.get_tagged

    def counted(self: LocalStore, path: str) -> tuple[bytes, str] | None:
        read[path] += 1
        return get_tagged(self, path)

    monkeypatch.setattr(LocalStore, "get_tagged", counted)
    loop = read_loop(StoreReader(ArtifactRepository(store), tmp_path / "cache"), "nightly")
    assert loop is not None
    records = {path: count for path, count in read.items() if re.fullmatch("stages/round/.*/manifest.json", path)}
    assert list(records.values()) == [1, 1, 1]
