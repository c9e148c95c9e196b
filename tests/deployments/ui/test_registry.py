"""The pages of models: who is champion, what waits, and which forms move an alias."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deployments.ui.demo import write_demo
from rlhf_core.artifacts.aliases import Alias, read_alias
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.record import NodeRecord, RunRecord, read_record
from tests.deployments.ui.made_runs import publish, record, ref_of
from tests.deployments.ui.served import browsing

pytestmark = pytest.mark.parts

HOSTILE = "<script>alert(1)</script>\"'"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[httpx.Client, LocalStore]]:
    """A server whose model `sums` has a champion, moved twice, and a candidate that waits."""
    store = LocalStore(tmp_path / "store")
    write_demo(ArtifactRepository(store), runs=3, steps=2)
    with browsing(store, tmp_path / "cache") as client:
        client.headers["Origin"] = str(client.base_url).rstrip("/")
        yield client, store


def champion(store: LocalStore) -> Alias:
    alias = read_alias(store, "sums", "champion")
    assert alias is not None
    return alias


def runs(store: LocalStore) -> list[RunRecord]:
    found = (read_record(store, path.split("/")[1]) for path in store.list("runs/") if path.endswith("run.json"))
    return [run for run in found if run is not None]


def fields(page: str) -> dict[str, str]:
    """The hidden fields of the forms of a page."""
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))


def test_a_model_shows_since_when_who_is_champion_and_what_waits(registry: tuple[httpx.Client, LocalStore]) -> None:
    browser, store = registry
    models = browser.get("/models").text
    made = {node.ref: f"/runs/{run.run_id}/{node.name}" for run in runs(store) for node in run.nodes}
    link = f'<a href="{made[champion(store).manifest]}">{champion(store).manifest}</a>'
    assert f'<td class="nowrap">{link}</td>' in models
    assert ">a candidate waits for a person</a>" in models
    page = browser.get("/models/sums").text
    assert f"The champion is <b>{link}</b> since {champion(store).moved_at:%Y-%m-%d %H:%M}" in page
    candidate = read_alias(store, "sums", "candidate")
    assert candidate is not None
    both = [made[each.manifest].split("/")[2] for each in (champion(store), candidate)]
    assert f'<a href="/compare?run={both[0]}&amp;run={both[1]}">Compare the runs of both</a>' in page
    assert page.index("run 1 was better") < page.index("run 0 was better")
    (drawn,) = re.findall(
        r"<td>evaluation\.exact</td><td>(<svg.*?</svg>)</td><td[^>]*>[+-]0\.\d+</td>"
        r"<td[^>]*>[+-]0\.\d+ to [+-]0\.\d+</td>",
        page, re.DOTALL,
    )  # fmt: skip
    assert 'class="range"' in drawn
    assert browser.get("/models/none").status_code == 404


def test_a_run_says_which_alias_its_model_is_and_what_waits(registry: tuple[httpx.Client, LocalStore]) -> None:
    browser, store = registry
    *_, second, third = sorted(runs(store), key=lambda run: run.started_at)
    since = f"since {champion(store).moved_at:%Y-%m-%d %H:%M} UTC, moved by demo, approved by demo."
    page = browser.get(f"/runs/{second.run_id}").text
    assert f'It is <a href="/models/sums"><b>sums/champion</b></a> {since}' in page
    page = browser.get(f"/runs/{third.run_id}").text
    assert "<b>sums/candidate</b></a> since" in page
    assert 'moved by demo: <a class="waiting" href="/models/sums">it waits for a person</a>.' in page
    assert "<b>nightly/accepted</b></a> since" in page
    assert "It is <a" not in browser.get(f"/runs/{min(runs(store), key=lambda run: run.started_at).run_id}").text


def test_benchmarks_compare_too_and_manifests_are_read_once(
    registry: tuple[httpx.Client, LocalStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, store = registry
    candidate = read_alias(store, "sums", "candidate")
    assert candidate is not None
    for model, scores in {champion(store).manifest: (0, 0), candidate.manifest: (1, 0)}.items():
        rows = [
            {"id": str(i), "prompt": "?", "completions": [{"text": "!", "scores": {"arc": float(score)}}]}
            for i, score in enumerate(scores)
        ]
        folder = tmp_path / model.key
        folder.mkdir()
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        ref = ref_of(model.key, "benchmark")
        publish(store, ref, folder, kind=Kind.EVALUATION, name="benchmark.x", parents={"model": model})
    page = browser.get("/models/sums").text
    assert re.search(r"<td>benchmark\.arc</td><td><svg.*?</svg></td><td[^>]*>\+0\.500</td>", page, re.DOTALL)
    read: list[str] = []
    get_tagged = LocalStore.get_tagged

    def counted(self: LocalStore, path: str) -> tuple[bytes, str] | None:
        read.append(path)
        return get_tagged(self, path)

    monkeypatch.setattr(LocalStore, "get_tagged", counted)
    assert browser.get("/models/sums").text == page
    of_models = [path for path in read if path.startswith(("stages/evaluation/", "stages/benchmark/"))]
    assert len(set(of_models)) == 4  # those of both models, whose files are looked for


def test_a_waiting_candidate_is_approved_once_and_rolled_back(registry: tuple[httpx.Client, LocalStore]) -> None:
    browser, store = registry
    before, shown = champion(store), fields(browser.get("/models/sums").text)
    nameless = browser.post("/models/sums/approve", data={**shown, "name": " ", "reason": "better"})
    assert (nameless.status_code, "give your name" in nameless.text) == (409, True)
    assert champion(store) == before
    form = {**shown, "name": HOSTILE, "reason": "better"}
    approved = browser.post("/models/sums/approve", data=form)
    assert (approved.status_code, approved.url.path, HOSTILE in approved.text) == (200, "/models/sums", False)
    after = champion(store)
    assert (after.manifest.full, after.evidence.approved_by) == (shown["candidate"], HOSTILE)
    again = browser.post("/models/sums/approve", data=form)
    assert (again.status_code, 'role="alert"' in again.text) == (409, True)
    user = re.escape(getpass.getuser())
    assert re.search(rf"as made by {user}, who runs this server", approved.text)
    assert f"<button>Roll back to {before.manifest}</button>" in approved.text
    back = {**fields(approved.text), "reason": "it is rude"}
    for other in ({}, {"confirmed": after.manifest.full}):
        unsure = browser.post("/models/sums/rollback", data=back | other)
        assert (unsure.status_code, f"confirm that sums/champion is {before.manifest} again" in unsure.text) == (
            409,
            True,
        )
    back |= dict(re.findall(r'<input type="checkbox" name="(\w+)" value="([^"]*)" required>', approved.text))
    assert browser.post("/models/sums/rollback", data=back).status_code == 200
    assert champion(store).manifest == before.manifest
    twice = browser.post("/models/sums/rollback", data=back)  # a second click on the same page
    assert (twice.status_code, "was moved by another process" in twice.text) == (409, True)
    assert champion(store).manifest == before.manifest


def test_a_rejected_candidate_is_promoted_no_more(registry: tuple[httpx.Client, LocalStore]) -> None:
    browser, _ = registry
    shown = {**fields(browser.get("/models/sums").text), "name": "ann", "reason": "it is rude"}
    rejected = browser.post("/models/sums/reject", data=shown)
    assert "Rejected by ann: it is rude" in rejected.text
    assert "/models/sums/promote" not in rejected.text
    promoted = browser.post("/models/sums/promote", data=shown)
    assert (promoted.status_code, "was rejected by ann (it is rude)" in promoted.text) == (409, True)


def test_a_candidate_without_a_passed_gate_is_promoted_by_a_named_person(
    registry: tuple[httpx.Client, LocalStore],
) -> None:
    browser, store = registry
    other = next(ArtifactRepository(store).list_artifacts("base")).ref
    move_alias(store, "sums", "candidate", other, by="bob", reason="by hand")
    shown = fields(browser.get("/models/sums").text)
    refused = browser.post("/models/sums/promote", data={**shown, "name": "", "reason": "better"})
    assert (refused.status_code, "is protected" in refused.text) == (409, True)
    browser.post("/models/sums/promote", data={**shown, "name": "ann", "reason": "better"})
    assert (champion(store).manifest, champion(store).evidence.approved_by) == (other, "ann")


@pytest.mark.parametrize("origin", [None, "null", "http://127.0.0.1:1", "https://evil.example"])
def test_a_form_of_another_page_moves_nothing(registry: tuple[httpx.Client, LocalStore], origin: str | None) -> None:
    browser, store = registry
    before, shown = champion(store), fields(browser.get("/models/sums").text)
    del browser.headers["Origin"]
    headers = {} if origin is None else {"Origin": origin}
    answer = browser.post("/models/sums/approve", data={**shown, "name": "eve", "reason": "x"}, headers=headers)
    assert answer.status_code == 403
    assert champion(store) == before


@pytest.mark.parametrize(
    ("path", "form", "status"),
    [("/models/sums/delete", {}, 404), ("/models/none/reject", {"name": "a", "candidate": "rl/" + "0" * 64}, 404),
     ("/models/sums/approve", {"name": "a", "candidate": "x"}, 409), ("/models/sums/rollback", {"reason": "x"}, 409),
     ("/models/sums/rollback", {"reason": "x", "seen": "9"}, 409)],
)  # fmt: skip
def test_a_form_that_is_none_of_ours_is_refused(
    registry: tuple[httpx.Client, LocalStore], path: str, form: dict[str, str], status: int
) -> None:
    browser, store = registry
    before = champion(store)
    assert browser.post(path, data=form).status_code == status
    assert champion(store) == before


def test_a_run_begins_with_the_verdict_of_its_gate(registry: tuple[httpx.Client, LocalStore], tmp_path: Path) -> None:
    browser, store = registry
    (tmp_path / "gate").mkdir()
    verdict = {"accepted": False, "reason": f"it is rude {HOSTILE}", "comparisons": []}
    (tmp_path / "gate" / "verdict.json").write_text(json.dumps(verdict), encoding="utf-8")
    gate = ref_of("gated", "gate")
    publish(
        store, gate, tmp_path / "gate", kind=Kind.GATE, parents={"candidate": ref_of("a"), "baseline": ref_of("b")}
    )  # fmt: skip
    record(store, [NodeRecord(name="gate", ref=gate, outcome="computed")], run_id="gated")
    page = browser.get("/runs/gated").text
    assert '<p class="headline">The model is <b class="failed">refused</b> by gate: it is rude &lt;' in page
    assert "<h2>gate: refused</h2>" in page
    assert HOSTILE not in page
