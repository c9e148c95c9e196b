"""The page of all runs: every filter and every order is an address, which opens exactly that view."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.pipeline.record import NodeRecord, RunRecord, RunStart, write_record, write_start
from rlhf_core.recipe import prices
from rlhf_core.system.yaml_text import read_yaml_file
from tests.deployments.ui.served import browsing

pytestmark = pytest.mark.parts

AT = datetime(2026, 11, 1, tzinfo=UTC)
RL = ArtifactRef(stage="rl", key="a" * 64)
HOSTILE = '"><b>'


def write(
    store: LocalStore, run_id: str, hour: int, *, core: float | None, minutes: int, tags: tuple[str, ...]
) -> None:
    """A run that had two cores for so many minutes, at a price of `core` an hour."""
    started = AT + timedelta(hours=hour)
    attempt = Attempt(
        id="a", run_id=run_id, host="h", device="cpu", gpus=0, cores=2, started_at=started,
        seen_at=started + timedelta(minutes=minutes), outcome="published",
    )  # fmt: skip
    of_recipe = {} if core is None else {"prices": {"currency": "EUR", "core": core}}
    write_record(
        store,
        RunRecord(
            run_id=run_id, recipe={"name": "r"} | of_recipe,
            overrides=(), tags=tags, started_at=started, finished_at=started + timedelta(minutes=minutes),
            nodes=(NodeRecord(name="rl", ref=RL, outcome="computed", attempts=(attempt,)),),
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    store = LocalStore(tmp_path_factory.mktemp("runs") / "store")
    write(store, "cheap", 1, core=1.0, minutes=60, tags=("nightly",))
    write(store, "dear", 2, core=12.0, minutes=30, tags=("nightly", HOSTILE))
    write(store, "unpriced", 3, core=None, minutes=90, tags=())
    started = datetime.now(UTC)
    write_start(
        store,
        RunStart(run_id="live", recipe={"name": "r"}, overrides=(), started_at=started, nodes={}, tags=("of a week",)),
    )
    with browsing(store, tmp_path_factory.mktemp("cache")) as client:
        yield client


def shown(browser: httpx.Client, path: str) -> list[str]:
    return re.findall(r'<td><a href="/runs/(\w+)">', browser.get(path).text)


@pytest.mark.parametrize(
    ("path", "runs"),
    [("/", ["live", "unpriced", "dear", "cheap"]),
     ("/?sort=-started", ["cheap", "dear", "unpriced", "live"]),
     ("/?sort=cost", ["dear", "cheap", "live", "unpriced"]),
     ("/?sort=-cost", ["cheap", "dear", "live", "unpriced"]),
     ("/?sort=hours", ["unpriced", "cheap", "dear", "live"]),
     ("/?sort=time", ["unpriced", "cheap", "dear", "live"]),
     ("/?sort=-time", ["dear", "cheap", "unpriced", "live"]),
     ("/?tag=nightly", ["dear", "cheap"]),
     ("/?tag=night", []),
     ("/?tag=of+a+week", ["live"]),
     ("/?min_cost=2.01", ["dear"]),
     ("/?max_cost=2", ["cheap"]),
     ("/?min_minutes=60&max_minutes=60", ["cheap"]),
     ("/?outcome=unfinished", ["live"])],
)  # fmt: skip
def test_an_address_opens_one_view(browser: httpx.Client, path: str, runs: list[str]) -> None:
    assert shown(browser, path) == runs


def test_a_view_links_to_the_others_of_the_same_filter(browser: httpx.Client) -> None:
    page = browser.get("/?tag=nightly&sort=cost").text
    (cheapest,) = re.findall(r'<a href="([^"]*)">cost</a> ▼', page)
    assert shown(browser, html.unescape(cheapest)) == ["cheap", "dear"]
    chips = [html.unescape(path) for path in re.findall(r'<a class="chip" href="([^"]*)">', page)]
    assert shown(browser, chips[-1]) == ["dear", "cheap"]
    assert [shown(browser, path) for path in chips if "%" in path] == [["dear"]]
    assert HOSTILE not in page
    assert "nightly" in browser.get("/runs/cheap").text


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("/?sort=name", "runs are sorted by started, time, hours, cost, not by `name`"),
     ("/?min_cost=much", "give `min_cost` as a number")],
)  # fmt: skip
def test_an_address_that_is_no_view_is_refused(browser: httpx.Client, path: str, sentence: str) -> None:
    answer = browser.get(path)
    assert (answer.status_code, sentence in answer.text) == (404, True)


def test_the_file_of_prices_is_read_once_for_all_runs_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = LocalStore(tmp_path / "store"), tmp_path / "prices.yaml"
    file.write_text("{currency: EUR, core: 6.0}", encoding="utf-8")
    monkeypatch.setenv("ALIGNMENT_PRICES", str(file))
    read: list[Path] = []

    def counted(path: Path) -> object:
        read.append(path)
        return read_yaml_file(path)

    monkeypatch.setattr(prices, "read_yaml_file", counted)
    for hour in range(3):
        write(store, f"run {hour}", hour, core=None, minutes=30, tags=())
    with browsing(store, tmp_path / "cache") as browser:
        page = browser.get("/", params={"sort": "cost", "min_cost": "1"}).text
        write(store, "run 3", 4, core=None, minutes=30, tags=())
        file.write_text("{currency: EUR, core: 12.0}", encoding="utf-8")
        dearer = browser.get("/", params={"q": "run 3"}).text
    assert page.count('<td class="number">6.00 EUR</td>') == 3
    assert '<td class="number">12.00 EUR</td>' in dearer
    assert read == [file, file]
