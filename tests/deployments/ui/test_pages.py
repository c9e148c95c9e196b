"""The pages of `alignment ui`: who gets them, what they show of a store, and what hostile text in it does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.ui.demo import write_demo
from deployments.ui.pages import Pages
from deployments.ui.reading import StoreReader
from deployments.ui.server import application
from rlhf_core.artifacts.aliases import Alias, read_alias
from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.leases import Lease, lease_path, take_lease
from rlhf_core.artifacts.live import LiveFiles
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.logged_rollouts import LoggedGroup, LoggedStep, encode_step, rollouts_file
from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from rlhf_core.artifacts.rounds import Rounds
from rlhf_core.pipeline.record import NodeRecord, RunRecord, RunStart, write_record, write_start
from rlhf_core.system.network import listening
from tests.deployments.ui.made_runs import publish, record, ref_of
from tests.deployments.ui.served import served

pytestmark = pytest.mark.parts

TOKEN = "secret"
HOSTILE = "<script>alert(1)</script>\"'"
RL = ArtifactRef(stage="rl", key="a" * 64)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    store = LocalStore(tmp_path_factory.mktemp("ui") / "store")
    write_demo(ArtifactRepository(store), runs=2, steps=5)
    live = LiveFiles(store, RL)
    start = RunStart(
        run_id="live", recipe={"name": HOSTILE}, overrides=("x=1",), started_at=datetime.now(UTC), nodes={"rl": RL}
    )
    write_start(store, start)
    live.put("metrics.jsonl", b'{"step": 0, "time": 1.0, "reward": 1.0}\n{"step": 1, "time": 2.0, "reward": null}\n')
    group = LoggedGroup(id="r", prompt=({"role": HOSTILE, "content": HOSTILE},), answer=HOSTILE, completions=())
    step = LoggedStep(step=2, prompts=1, completions=0, histograms={}, groups=(group,))
    live.put(f"rollouts/{rollouts_file(2)}", encode_step(step))
    return store


@pytest.fixture(scope="module")
def server(store: LocalStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pages = Pages(StoreReader(ArtifactRepository(store), tmp_path_factory.mktemp("cache")))
    with listening("127.0.0.1", 0) as listener, served(application(pages, TOKEN, frozenset({"127.0.0.1"})), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def browser(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, follow_redirects=True) as client:
        assert client.get(f"/?token={TOKEN}").status_code == 200
        yield client


def test_only_who_has_the_token_and_the_right_name_gets_a_page(server: str) -> None:
    assert httpx.get(server).status_code == 401
    assert httpx.get(f"{server}/?token=other").status_code == 401
    assert httpx.get(f"{server}/static/ui.css").status_code == 401
    assert httpx.get(server, cookies={"alignment-ui": "other"}).status_code == 401
    first = httpx.get(f"{server}/runs/x?token={TOKEN}&q=1")
    assert (first.status_code, first.headers["location"]) == (302, "/runs/x?q=1")  # the token is in no further URL
    several = httpx.get(f"{server}/compare?run=a&token={TOKEN}&run=b")
    assert several.headers["location"] == "/compare?run=a&run=b"
    assert "HttpOnly" in first.headers["set-cookie"]
    assert "SameSite=Strict" in first.headers["set-cookie"]
    rebound = httpx.get(f"{server}/?token={TOKEN}", headers={"Host": "evil.example"})
    assert rebound.status_code == 403


def test_from_the_list_of_runs_to_a_token(browser: httpx.Client) -> None:
    runs = browser.get("/").text
    (path,) = set(re.findall(r'href="(/runs/[0-9a-f]{32})">sums', browser.get("/", params={"q": "seed=1"}).text))
    assert path in runs
    page = browser.get(path).text
    assert re.search(
        r"<b>rl</b> scores \+0\.\d+ \(\+0\.\d+ to \+0\.\d+\)\s+against base, by exact of greedy completions on 40 "
        r"prompts: better",
        page,
    )
    assert f'{path}/rl/steps/5">rollouts' in page
    node = browser.get(f"{path}/rl").text
    charts = data_of(node, "charts")
    assert [chart["title"] for chart in charts["charts"]] == [
        "reward and KL", "completion length", "entropy",
    ]  # fmt: skip
    assert charts["steps"] == [[step, f"{path}/rl/steps/{step}"] for step in range(1, 6)]
    assert [(line["name"], line["right"]) for line in charts["charts"][0]["lines"]] == [("reward", False), ("kl", True)]
    assert charts["charts"][0]["lines"][0]["x"] == [1, 2, 3, 4, 5]
    assert "Step 99 is not logged: this is the nearest." in browser.get(f"{path}/rl/steps/99").text
    step = browser.get(f"{path}/rl/steps/1").text
    assert f'{path}/rl/steps/1/groups/0/0"' in step
    bar = browser.get(f"{path}/rl/steps/5", params={"histogram": "reward", "low": "0.5", "high": "1"}).text
    assert bar.count("/rl/steps/5/groups/") > step.count("/rl/steps/1/groups/")
    group = browser.get(f"{path}/rl/steps/5/groups/1").text
    assert len(re.findall("<article>", group)) == 4
    completion = browser.get(f"{path}/rl/steps/5/groups/1/2").text
    tokens = data_of(completion, "tokens")
    assert {name for name, values in tokens.items() if values[0] is not None} == {"text", "id"}
    assert {name for name, values in tokens.items() if values[-1] is not None} == {
        "text", "id", "engine", "trainer", "entropy", "reference", "advantage",
    }  # fmt: skip


def data_of(page: str, name: str) -> Any:
    """The first data of this name for a script of the page."""
    found = re.search(rf"data-{name}='([^']*)'", page)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize(
    "path", ["/runs/none", "/runs/live/none", "/runs/live/rl/steps/x", "/runs/live/rl/steps/2/groups/7",
             "/runs/live/rl/images/" + "0" * 64, "/compare?run=none"],
)  # fmt: skip
def test_what_is_not_there_is_a_sentence(browser: httpx.Client, path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 404
    assert re.search(r"<p>[^<]+</p>", answer.text)


def test_a_running_stage_shows_its_metrics_and_rollouts_so_far(browser: httpx.Client, store: LocalStore) -> None:
    assert ">waiting<" in browser.get("/runs/live").text
    lease = take_lease(store, lease_path(RL))
    assert isinstance(lease, Lease)
    with lease:
        assert ">running<" in browser.get("/runs/live").text
        node = browser.get("/runs/live/rl").text
        assert 'http-equiv="refresh"' in node
        assert "steps/2" in node
    assert "refresh" not in browser.get("/runs/live/rl/steps/2").text  # nothing that somebody reads goes away


def test_a_loop_shows_each_round_against_the_accepted_and_against_the_start(
    browser: httpx.Client, store: LocalStore
) -> None:
    assert '<a href="/loops/nightly">nightly</a>' in browser.get("/loops").text
    page = browser.get("/loops/nightly").text
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
    charts = data_of(page, "charts")["charts"]
    assert [(chart["title"], chart["lines"][-1]["x"]) for chart in charts] == [
        ("score", [1, 2]), ("against the start", [1, 2])
    ]  # fmt: skip
    assert browser.get("/loops/none").status_code == 404
    assert browser.get("/loops/..%2f..").status_code == 404


def test_a_round_that_has_not_ended_leads_its_loop(registry: tuple[httpx.Client, LocalStore]) -> None:
    browser, store = registry
    rounds = Rounds(store, "nightly")
    rounds.start(rounds.current("a run"))
    page = browser.get("/loops/nightly").text
    assert "Round 4 is unfinished: the next run of the loop finishes it" in page
    assert 'http-equiv="refresh"' in page


def test_runs_have_costs_at_the_prices_of_the_environment(
    registry: tuple[httpx.Client, LocalStore], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    browser, store = registry
    (tmp_path / "prices.yaml").write_text("{currency: EUR, core: 6.0}", encoding="utf-8")
    monkeypatch.setenv("ALIGNMENT_PRICES", str(tmp_path / "prices.yaml"))
    at = datetime(2026, 11, 1, tzinfo=UTC)
    attempt = Attempt(
        id="a", run_id="priced", host="h", device="cpu", gpus=0, cores=2, started_at=at,
        seen_at=at + timedelta(minutes=30), outcome="stuck", reason=HOSTILE,
    )  # fmt: skip
    node = NodeRecord(name="rl", ref=RL, outcome="failed", attempts=(attempt,))
    record = RunRecord(
        run_id="priced", recipe={"name": "priced"}, overrides=(), started_at=at, finished_at=at, nodes=(node,)
    )  # fmt: skip
    write_record(store, record)
    assert '<td class="number">6.00 EUR</td>' in browser.get("/", params={"q": "priced"}).text
    page = browser.get("/runs/priced").text
    assert "It took 1 device hours, <b>6.00 EUR</b>." in page
    assert '<td class="failed">stuck</td>' in page
    assert HOSTILE not in page


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[httpx.Client, LocalStore]]:
    """A server of its own, whose model `sums` has a champion, moved twice, and a candidate that waits."""
    store = LocalStore(tmp_path / "store")
    write_demo(ArtifactRepository(store), runs=3, steps=2)
    pages = Pages(StoreReader(ArtifactRepository(store), tmp_path / "cache"))
    with listening("127.0.0.1", 0) as listener, served(application(pages, TOKEN, frozenset({"127.0.0.1"})), listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, follow_redirects=True, headers={"Origin": url}) as client:
            client.get(f"/?token={TOKEN}")
            yield client, store


def champion(store: LocalStore) -> Alias:
    alias = read_alias(store, "sums", "champion")
    assert alias is not None
    return alias


def fields(page: str) -> dict[str, str]:
    """The hidden fields of the forms of a page."""
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))


def test_a_model_shows_since_when_who_is_champion_and_what_waits(registry: tuple[httpx.Client, LocalStore]) -> None:
    browser, store = registry
    models = browser.get("/models").text
    assert f"<td>{champion(store).manifest}</td>" in models
    assert ">a candidate waits for a person</a>" in models
    page = browser.get("/models/sums").text
    assert f"The champion is <b>{champion(store).manifest}</b> since {champion(store).moved_at:%Y-%m-%d %H:%M}" in page
    assert page.index("run 1 was better") < page.index("run 0 was better")
    assert re.search(r"<td>evaluation\.exact</td><td[^>]*>[+-]0\.\d+</td><td[^>]*>[+-]0\.\d+ to [+-]0\.\d+</td>", page)
    assert browser.get("/models/none").status_code == 404


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
    back = {**fields(approved.text), "reason": "it is rude"}
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


def test_text_of_models_and_users_is_never_markup(browser: httpx.Client) -> None:
    for path in ("/", "/runs/live", "/runs/live/rl", "/runs/live/rl/steps/2", "/runs/live/rl/steps/2/groups/0"):
        answer = browser.get(path)
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text, path
        assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_damaged_documents_are_named_and_hide_no_other_run(browser: httpx.Client, store: LocalStore) -> None:
    store.put("runs/broken/run.json", b"{")
    assert "sums" in browser.get("/").text
    answer = browser.get("/runs/broken")
    assert (answer.status_code, "runs/broken/run.json is not the record of a run" in answer.text) == (502, True)
    run = next(run for run in StoreReader(ArtifactRepository(store), Path("unused")).runs() if run.name == "sums")
    manifest = ArtifactRepository(store).manifest(run.nodes["rl"])
    assert manifest is not None
    damaged = next(file for file in manifest.files if file.path.endswith(rollouts_file(3)))
    kept = store.get(blob_path(damaged.sha256))
    assert kept is not None
    store.put(blob_path(damaged.sha256), b"other")
    assert "is damaged" in browser.get(f"/runs/{run.run_id}/rl/steps/3").text
    store.put(blob_path(damaged.sha256), kept)


def test_compared_runs_show_what_differs_and_by_how_much(browser: httpx.Client, store: LocalStore) -> None:
    runs = [run for run in StoreReader(ArtifactRepository(store), Path("unused")).runs() if run.name == "sums"]
    page = browser.get("/compare", params={"run": [run.run_id for run in reversed(runs)]}).text
    row = re.search(r"<tr><td>rl.grpo.optimizer.learning_rate</td><td>(.*?)</td><td>(.*?)</td></tr>", page)
    assert row is not None
    assert row.groups() == ("0.001", "0.002")
    assert re.search(r"scores [+-]0\.\d+ \([+-]0\.\d+ to [+-]0\.\d+\)\s+against sums \w{8}, by exact of greedy", page)
    assert "rl: reward" in page
    live = browser.get("/compare", params={"run": [runs[0].run_id, "live"]})
    assert "compared when all runs have ended" in live.text
