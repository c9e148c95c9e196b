"""The pages of `alignment ui`: who gets them, what they show of a store, and what hostile text in it does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from deployments.ui.demo import write_demo
from deployments.ui.demo_run import RUN_ID, write_demo_run
from deployments.ui.pages import Pages
from deployments.ui.reading import StoreReader
from deployments.ui.server import application
from rlhf_core.artifacts.attempt import Attempt, JudgeUse
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.checkpoints import Checkpoint, Checkpoints
from rlhf_core.artifacts.leases import Lease, lease_path, take_lease
from rlhf_core.artifacts.live import LiveFiles
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.logged_rollouts import (
    LoggedCompletion,
    LoggedGroup,
    LoggedSequence,
    LoggedStep,
    encode_step,
    rollouts_file,
)
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from rlhf_core.pipeline.record import NodeRecord, RunRecord, RunStart, write_record, write_start
from rlhf_core.system.network import listening
from tasks.followers import Follower
from tasks.job_request import artifact_prefix
from tests.deployments.ui.made_runs import AT, publish, record, ref_of
from tests.deployments.ui.served import browsing, data_of, served

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
    asked = {"role": HOSTILE, "content": HOSTILE, "images": ["f" * 64]}
    group = LoggedGroup(id="r", prompt=(asked,), answer=HOSTILE, completions=())
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
    cookie = f"alignment-ui-{httpx.URL(server).port}"  # one for each server of a host
    assert httpx.get(server, cookies={cookie: "other"}).status_code == 401
    assert httpx.get(server, cookies={cookie: TOKEN}).status_code == 200
    first = httpx.get(f"{server}/runs/x?token={TOKEN}&q=1")
    assert (first.status_code, first.headers["location"]) == (302, "/runs/x?q=1")  # the token is in no further URL
    several = httpx.get(f"{server}/compare?run=a&token={TOKEN}&run=b")
    assert several.headers["location"] == "/compare?run=a&run=b"
    assert "HttpOnly" in first.headers["set-cookie"]
    assert "SameSite=Lax" in first.headers["set-cookie"]
    assert first.headers["set-cookie"].startswith(f"{cookie}={TOKEN};")
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
    assert page.count(f'{path}/rl/steps/5">completions of the last step</a>') == 2  # at the curves, and at the stages
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
    edges, counts = ([chart[name] for chart in data_of(bar, "charts")["charts"]][1] for name in ("edges", "counts"))
    low = browser.get(
        f"{path}/rl/steps/5", params={"histogram": "ratio", "low": str(edges[0]), "high": str(edges[1])}
    ).text
    assert low.count("<li>") == counts[0] > 0
    assert bar.count("/rl/steps/5/groups/") > step.count("/rl/steps/1/groups/")
    group = browser.get(f"{path}/rl/steps/5/groups/1").text
    assert len(re.findall("<article>", group)) == 4
    assert group.count("answer: ") == 1 + group.count('">reward 0</a>')  # of the prompt, and near each wrong text
    completion = browser.get(f"{path}/rl/steps/5/groups/1/2").text
    for page in (group, completion):
        number = '<td class="number">{}</td>'
        row = f"<tr><td>exact</td>{number.format('([01])')}{number.format('[1–]')}{number.format('.1')}</tr>"
        assert re.search(row.replace(".1", r"\1"), page)
        assert re.search(r'shaping</td><td></td><td></td><td class="number">0</td>', page)
    tokens = data_of(completion, "tokens")
    assert {name for name, values in tokens.items() if values[0] is not None} == {"text", "id"}
    assert {name for name, values in tokens.items() if values[-1] is not None} == {
        "text", "id", "engine", "trainer", "entropy", "reference", "advantage",
    }  # fmt: skip


def test_prompts_and_completions_have_the_same_order_and_numbers_on_both_pages(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    live = LiveFiles(store, RL)
    write_start(store, RunStart(run_id="live", recipe={}, overrides=(), started_at=datetime.now(UTC), nodes={"rl": RL}))
    easy, hard = (
        LoggedGroup(
            id=asked, prompt=({"role": "user", "content": asked},), answer="74",
            completions=tuple(
                LoggedCompletion(
                    text=f"{'thought ' * 30}\nso it is {reward or 0:g}", finish_reason="stop", turns=1, reward=reward,
                    rewards={}, versions=(), sequences=(),
                )
                for reward in rewards
            ),
        )
        for asked, rewards in {"easy": (1.0, 0.75), "hard": (0.5, None, 0.25)}.items()
    )  # fmt: skip
    step = LoggedStep(step=1, prompts=2, completions=5, histograms={}, groups=(easy, hard))
    live.put(f"rollouts/{rollouts_file(1)}", encode_step(step))
    with browsing(store, tmp_path / "cache") as browser:
        page = browser.get("/runs/live/rl/steps/1").text
        prompt = browser.get("/runs/live/rl/steps/1/groups/1").text
    assert re.findall(r'>(prompt \d)</span> <a href="[^"]*">(\w+)</a>', page) == [
        ("prompt 2", "hard"),
        ("prompt 1", "easy"),
    ]
    places = re.findall(r'/steps/1/groups/1/(\d)"', page)
    assert places == re.findall(r'/steps/1/groups/1/(\d)"', prompt) == ["2", "0", "1"]
    assert "<h1>Prompt 2 of step 1</h1>" in prompt
    assert re.findall(r'<bdi dir="ltr">…[^<]*so it is ([\d.]+)</bdi>', page) == ["0.25", "0.5", "0", "0.75", "1"]


def test_the_interval_of_a_share_is_within_0_and_1(browser: httpx.Client) -> None:
    for path in set(re.findall(r'href="(/runs/[0-9a-f]{32})">sums', browser.get("/").text)):
        bounds = re.findall(r'<span class="quiet">(-?[\d.]+)–(-?[\d.]+)</span>', browser.get(path).text)
        assert len(bounds) == 2
        assert all(0 <= float(low) < float(high) <= 1 for low, high in bounds)


def test_a_run_of_the_demo_names_the_run_before_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    write_demo(ArtifactRepository(store), runs=3, steps=2)
    with browsing(store, tmp_path / "cache") as browser:
        last, before, _ = dict.fromkeys(re.findall(r'href="/runs/([0-9a-f]{32})">sums', browser.get("/").text))
        page = browser.get(f"/runs/{last}").text
    assert f"Settings that differ from the run {before[-8:]} before it</h2>" in page


def test_the_run_before_a_run_is_found_however_many_came_after_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for number in range(60):
        record(store, [], f"run-{number:02}", started_at=AT + timedelta(hours=number))
    with browsing(store, tmp_path / "cache") as browser:
        page = browser.get("/runs/run-03").text
    assert "None: the run run-02 of this recipe had the same." in page


def test_notes_on_an_evaluation_are_of_what_it_has(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    write_demo(ArtifactRepository(store), runs=1, steps=2)
    write_demo_run(ArtifactRepository(store))
    with browsing(store, tmp_path / "cache") as browser:
        (path,) = set(re.findall(r'href="(/runs/[0-9a-f]{32})">sums', browser.get("/").text))
        bounded, bare = browser.get(path).text, browser.get(f"/runs/{RUN_ID}").text
    assert '<p class="quiet">Small numbers: 95 % intervals.</p>' in bounded
    assert "Evaluation on held-out prompts" in bare
    assert "Small numbers" not in bare
    assert "pass@" not in bounded + bare


@pytest.mark.parametrize(
    "path", ["/nowhere", "/runs/none", "/runs/live/none", "/runs/live/rl/steps/x", "/runs/live/rl/steps/2/groups/7",
             "/runs/live/rl/images/" + "0" * 64, "/compare?run=none"],
)  # fmt: skip
def test_what_is_not_there_is_a_sentence(browser: httpx.Client, path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 404
    assert re.search(r"<p>[^<]+</p>", answer.text)
    assert '<a href="/">Back to the runs</a>' in answer.text


def test_a_number_that_is_too_long_for_python_is_none_of_a_page(browser: httpx.Client) -> None:
    long = "9" * 5000
    for path in (long, f"2/groups/{long}", f"2/groups/0/{long}"):
        assert browser.get(f"/runs/live/rl/steps/{path}").status_code == 404


def test_an_error_of_ours_is_a_page_and_in_the_log(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with browsing(store, tmp_path / "cache") as browser:
        monkeypatch.setattr(StoreReader, "runs", lambda _: 1 // 0)
        answer = browser.get("/?q=1")
    assert answer.status_code == 500
    assert "a defect of alignment, ZeroDivisionError" in answer.text
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    printed = capsys.readouterr().err
    assert printed.startswith("GET /?q=1\nTraceback")
    assert "ZeroDivisionError" in printed


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


def test_runs_have_costs_at_the_prices_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    (tmp_path / "prices.yaml").write_text(
        "{currency: EUR, core: 6.0, judges: {judge: {input: 0.0, output: 0.0}}}", encoding="utf-8"
    )
    monkeypatch.setenv("ALIGNMENT_PRICES", str(tmp_path / "prices.yaml"))
    at = datetime(2026, 11, 1, tzinfo=UTC)
    attempt = Attempt(
        id="a", run_id="priced", host="h", device="cpu", gpus=0, cores=2, started_at=at,
        seen_at=at + timedelta(minutes=30), outcome="stuck", reason=HOSTILE, energy={"cpu": 3.6e6},
        judges={"judge": JudgeUse(calls=2, prompt_tokens=900, completion_tokens=100)},
    )  # fmt: skip
    node = NodeRecord(name="rl", ref=RL, outcome="failed", attempts=(attempt,))
    record = RunRecord(
        run_id="priced", recipe={"name": "priced"}, overrides=(), started_at=at, finished_at=at, nodes=(node,)
    )  # fmt: skip
    write_record(store, record)
    with browsing(store, tmp_path / "cache") as browser:
        assert '<td class="number">6.00 EUR</td>' in browser.get("/", params={"q": "priced"}).text
        page = browser.get("/runs/priced").text
    assert "It took 1 device hours, <b>6.00 EUR</b>." in page
    assert '<td class="failed">stuck</td>' in page
    assert page.count('<td class="number">1 kWh cpu</td><td class="number">1,000 tokens</td>') == 2  # stage, and total
    assert HOSTILE not in page


def test_a_cost_that_is_not_known_is_not_zero(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    record(store, [NodeRecord(name="rl", ref=RL, outcome="computed")], "old")
    write_demo(ArtifactRepository(store), runs=1, steps=2)
    with browsing(store, tmp_path / "cache") as browser:
        old, new = (browser.get("/", params={"q": name}).text for name in ("old", "sums"))
        assert '<td class="number"><span class="quiet">not known</span></td>' in old
        assert '<td class="number">0.0667</td>\n<td class="number"><span class="quiet">no prices set</span></td>' in new
        page = browser.get("/runs/old").text
        (made,) = set(re.findall(r'href="(/runs/[0-9a-f]{32})"', new))
        assert "It took 0.0667 device hours." in browser.get(made).text
    assert "What rl took is not known: the record of the run has no attempts of it." in page
    assert "took 0 device hours" not in page


def test_text_of_models_and_users_is_never_markup(browser: httpx.Client) -> None:
    for path in ("/", "/runs/live", "/runs/live/rl", "/runs/live/rl/steps/2", "/runs/live/rl/steps/2/groups/0"):
        answer = browser.get(path)
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text, path
        assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_a_prompt_shows_its_images(browser: httpx.Client) -> None:
    page = browser.get("/runs/live/rl/steps/2/groups/0").text
    assert f'src="/runs/live/rl/images/{"f" * 64}" alt="image 1">' in page


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


def test_a_blob_that_is_gone_takes_no_page_away(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    write_demo(ArtifactRepository(store), runs=2, steps=2)
    runs = StoreReader(ArtifactRepository(store), Path("unused")).runs()
    for blob in store.list("blobs/"):
        store.delete(blob)
    with browsing(store, tmp_path / "cache") as browser:
        page, stage, compared, loop = (
            browser.get(path).text
            for path in (
                f"/runs/{runs[0].run_id}", f"/runs/{runs[0].run_id}/rl",
                f"/compare?run={runs[0].run_id}&run={runs[1].run_id}", "/loops/nightly",
            )
        )  # fmt: skip
    assert re.findall(r'<p class="note">(base|rl|evaluation\.\w+): ', page) == [
        "rl",
        "evaluation.base",
        "evaluation.rl",
    ]
    assert '<h2 id="stages">Stages</h2>' in page
    assert "<summary>Settings</summary>" in stage
    assert '<p class="note">' in stage
    assert "<td>time</td>" in compared
    assert re.findall(r'<a href="/runs/\w+">(\d)</a>', loop) == ["2", "1"]
    assert len(re.findall(r"<span[^>]*>([+-]\d\.\d{3})</span>", loop)) == 2


def test_compared_runs_show_what_differs_and_by_how_much(browser: httpx.Client, store: LocalStore) -> None:
    runs = [run for run in StoreReader(ArtifactRepository(store), Path("unused")).runs() if run.name == "sums"]
    one, two = (f"sums {run.run_id[-8:]}" for run in reversed(runs))
    page = browser.get("/compare", params={"run": [run.run_id for run in reversed(runs)]}).text
    row = re.search(r"<tr><td>rl.grpo.optimizer.learning_rate</td><td>(.*?)</td><td>(.*?)</td></tr>", page)
    assert row is not None
    assert row.groups() == ("0.001", "0.002")
    better = re.findall(
        r"<h2>(evaluation\.\w+)</h2>\n<p[^>]*><b>(.*)</b> is better than (.*) by (0\.\d+) "
        r"\(\+0\.\d+ to \+0\.\d+, 95 % interval\), by exact of greedy completions on 40 prompts\.",
        page,
    )
    assert better == [("evaluation.rl", two, one, "0.225"), ("evaluation.base", one, two, "0.150")]
    (changed,) = re.findall(rf"<h3>{two} scores higher than {one} on (\d+) of 40 prompts</h3>", page)[:1]
    assert f"Shown are 5 of {changed}, the largest changes first." in page
    assert "rl: reward" in page
    live = browser.get("/compare", params={"run": [runs[0].run_id, "live"]})
    assert "compared when all runs have ended" in live.text


def test_compared_runs_show_each_curve_that_one_of_them_has(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    for run, metrics in {"one": {"kl": [1, 2], "rate": [1, 1]}, "two": {"reward/exact": [0, 1], "kl": [3, 3]}}.items():
        lines = [{"step": i} | {name: values[i] for name, values in metrics.items()} for i in range(2)]
        folder = tmp_path / run
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line | {"seconds/a": line["step"]}) + "\n" for line in lines)
        )
        publish(store, ref_of(run, "rl"), folder)
        record(store, [NodeRecord(name="rl", ref=ref_of(run, "rl"), outcome="computed")], run)
    for number in range(6):
        record(store, [], f"more-{number}")
    with browsing(store, tmp_path / "cache") as browser:
        page = browser.get("/compare", params={"run": ["one", "two"]}).text
        many = browser.get("/compare", params={"run": ["one", "two", *(f"more-{number}" for number in range(6))]}).text
    lines = {chart["title"]: [line["name"] for line in chart["lines"]] for chart in data_of(page, "charts")["charts"]}
    assert lines == {"rl: kl": ["made one", "made two"], "rl: reward/exact": ["made two"]}
    assert "chosen.</p>" not in page
    assert "These are the first 6 of the 8 runs that were chosen." in many


def test_a_failed_run_begins_with_the_error_and_what_a_retry_does(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    words, sampled = ref_of("words"), ref_of("sampled", "generate")
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "rows.jsonl").write_text("{}\n")
    publish(store, words, rows)
    checkpoints, at = Checkpoints(store, RL), datetime(2026, 11, 1, tzinfo=UTC)
    checkpoints.commit(
        Checkpoint(name=checkpoints.new_name(6), step=6, ranks=1, files=(), libraries={}, created_at=at)
    )  # fmt: skip
    failed = NodeRecord(name="rl", ref=RL, outcome="failed", error="RewardError: no such row")
    nodes = [NodeRecord(name="data.words", ref=words, outcome="computed"), failed]
    record(store, [*nodes, NodeRecord(name="sampled", ref=sampled, outcome="not run")], "again")
    record(store, nodes[:1], "whole")
    with browsing(store, tmp_path / "cache") as browser:
        page = browser.get("/runs/again").text
        error = '<a href="/runs/again/rl">rl</a> <b class="failed">failed</b>: RewardError: no such row'
        retry = "<b>computes</b> sampled; <b>resumes</b> rl after step 6; <b>reuses</b> data.words."
        assert page.index("</h1>") < page.index(error) < page.index(retry) < page.index("Stages</h2>")
        assert "a retry" not in browser.get("/runs/whole").text


def test_a_run_that_was_killed_has_stopped_with_what_it_took(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    started = datetime.now(UTC) - timedelta(hours=2)
    attempt = Attempt(
        id="a", run_id="killed", host="h", device="cpu", gpus=0, cores=2, started_at=started,
        seen_at=started + timedelta(minutes=30),
    )  # fmt: skip
    Attempts(store, RL).write(attempt)
    recipe = {"name": "killed", "prices": {"currency": "EUR", "core": 6.0}}
    start = RunStart(run_id="killed", recipe=recipe, overrides=(), started_at=started, nodes={"rl": RL})
    write_start(store, start)
    record(store, [], "whole")
    with browsing(store, tmp_path / "cache") as browser:
        listed = browser.get("/", params={"outcome": "stopped", "min_cost": "1"}).text
        page = browser.get("/runs/killed").text
        compared = browser.get("/compare", params={"run": ["whole", "killed"]}).text
    assert '<td class="stopped">stopped</td>' in listed
    assert '<td class="number">30:00</td>' in listed
    assert '<td class="number">6.00 EUR</td>' in listed
    assert 'rl</a> <b class="failed">failed</b>: killed: its job was killed, or its node was lost' in page
    assert 'http-equiv="refresh"' not in page
    assert "when all runs have ended" not in compared
    assert "<tr><td>prices.core</td><td>–</td><td>6.0</td></tr>" in compared
    assert "<tr><td>cost</td><td>–</td><td>6.00 EUR</td></tr>" in compared


def test_a_run_that_follows_a_job_or_has_one_is_unfinished(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    started = datetime.now(UTC) - timedelta(hours=2)
    write_start(store, RunStart(run_id="old", recipe={}, overrides=(), started_at=started, nodes={"rl": RL}))

    def outcome() -> str:
        run = StoreReader(ArtifactRepository(store), tmp_path / "cache").run("old")
        assert run is not None
        return run.outcome

    assert outcome() == "stopped"
    job = f"{artifact_prefix(RL.stage, RL.key)}00000000-a"
    Follower(store, job, "other").join()
    assert outcome() == "stopped"
    follower = Follower(store, job, "old")
    follower.join()
    assert outcome() == "unfinished"
    follower.leave()
    assert outcome() == "stopped"
    lease = take_lease(store, lease_path(RL))
    assert isinstance(lease, Lease)
    with lease:
        assert outcome() == "unfinished"


def test_a_step_of_training_that_diverged_is_shown(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    write_start(store, RunStart(run_id="live", recipe={}, overrides=(), started_at=datetime.now(UTC), nodes={"rl": RL}))
    nan = float("nan")
    sequence = LoggedSequence(
        texts=("2", "4"), token_ids=(2, 4), trained=(True, True), engine_logprobs=(-1.0, -float("inf")),
        trainer_logprobs=(nan, nan), entropies=(nan, 0.5), values=(nan, nan), advantages=(nan, 1.0),
    )  # fmt: skip
    completion = LoggedCompletion(
        text="24", finish_reason="stop", turns=1, reward=nan, rewards={"exact": nan}, versions=((2, 1),),
        sequences=(sequence,),
    )  # fmt: skip
    group = LoggedGroup(id="r", prompt=(), completions=(completion,))
    step = LoggedStep(step=1, prompts=1, completions=1, histograms={}, groups=(group,))
    LiveFiles(store, RL).put(f"rollouts/{rollouts_file(1)}", encode_step(step))
    with browsing(store, tmp_path / "cache") as browser:
        page = browser.get("/runs/live/rl/steps/1/groups/0/0")
        bar = browser.get("/runs/live/rl/steps/1", params={"histogram": "ratio", "low": "0", "high": "2"}).text
    assert page.status_code == 200
    assert data_of(page.text, "tokens") == {
        "text": ["2", "4"], "id": [2, 4], "engine": [-1.0, None], "advantage": [None, 1.0], "trainer": [None, None],
        "entropy": [None, 0.5], "value": [None, None],
    }  # fmt: skip
    assert "None of the completions of this bar is logged." in bar
