"""The time line of a run: bars where its attempts were, what they waited for, and the phases of RL."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from deployments.ui.demo_run import RUN_ID, write_demo_run
from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.leases import Lease, lease_path, live_holder, take_lease
from rlhf_core.artifacts.live import LiveFiles
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.record import NodeRecord, RunStart, write_start
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.timeline import TimeLine, phases, time_line
from tests.deployments.ui.made_runs import AT, publish, record, ref_of
from tests.deployments.ui.served import browsing

pytestmark = pytest.mark.parts

HOSTILE = "<script>alert(1)</script>\"'"


def attempt(start: float, end: float, run_id: str = "made", **fields: object) -> Attempt:
    at = {"started_at": AT + timedelta(seconds=start), "seen_at": AT + timedelta(seconds=end)}
    defaults = {"id": f"{start}", "host": "h", "device": "cpu", "gpus": 0.0, "cores": 1.0, "outcome": "published"}
    return Attempt.model_validate(defaults | at | {"run_id": run_id} | fields)


def lane_of(page: str, name: str) -> str:
    """The part of a page between the link of a stage in the time line and the next one."""
    line = page.partition('<div class="timeline">')[2].partition('<p class="quiet key">')[0]
    return line.partition(f'">{name}</a>')[2].partition("<a href")[0]


def bars(lane: str) -> list[tuple[str, float, float]]:
    found = re.findall(r'<span class="bar ([a-z ]+)"[^>]* style="left: ([\d.]+)%; width: ([\d.]+)%"', lane)
    return [(outcome, float(left), float(width)) for outcome, left, width in found]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def page_of(store: LocalStore, tmp_path: Path, run_id: str) -> str:
    with browsing(store, tmp_path / "cache") as browser:
        answer: httpx.Response = browser.get(f"/runs/{run_id}")
        assert answer.status_code == 200
        return answer.text


def test_bars_stand_where_the_attempts_were(store: LocalStore, tmp_path: Path) -> None:
    write_demo_run(ArtifactRepository(store))
    page = page_of(store, tmp_path, RUN_ID)
    rl = lane_of(page, "rl")
    assert bars(rl) == [  # of 488 seconds
        ("killed", pytest.approx(54.098, abs=1e-3), pytest.approx(7.377, abs=1e-3)),
        ("stuck", pytest.approx(62.090, abs=1e-3), pytest.approx(11.680, abs=1e-3)),
        ("published", pytest.approx(74.180, abs=1e-3), pytest.approx(22.131, abs=1e-3)),
    ]
    assert '<span class="waited" style="width: 11.111%">' in rl  # 12 of 108 seconds
    assert "killed after 36 s, stuck after 57 s, published after 1:48, waited 12 s for room" in rl
    assert 'aria-label="rl: stuck, 09:05:03 to 09:06:00 (57 s); the phase `generate` took 40 s, and 3 s before"' in rl
    sft, other = lane_of(page, "evaluation.sft"), lane_of(page, "dpo")
    assert '<span class="gap" style="left: 24.590%; width: 4.098%">' in sft  # from 120 to 140 s
    assert "began 20 s after its inputs" in sft
    assert "after its inputs" not in other
    assert [bars(lane_of(page, name)) for name in ("base", "report")] == [[], []]
    assert ("reused" in lane_of(page, "base"), "not run" in lane_of(page, "report")) == (True, True)
    order = re.findall(r'">([\w.]+)</a>\n<div', page.partition('<div class="timeline">')[2])
    assert order[-3:] == ["evaluation.rl", "base", "report"]
    assert order.index("sft") < order.index("dpo") < order.index("rl")


def test_the_phases_of_rl_are_summed_over_its_steps(store: LocalStore, tmp_path: Path) -> None:
    write_demo_run(ArtifactRepository(store))
    rl = lane_of(page_of(store, tmp_path, RUN_ID), "rl")
    shares = [float(share) for share in re.findall(r'<span title="\w+" style="width: ([\d.]+)%', rl)]
    assert sum(shares) == pytest.approx(100, abs=0.01)
    assert "score 6.0 s" in rl  # twelve steps of half a second
    assert "publish 3.6 s" in rl
    found = phases(
        {"seconds/a": [(0, 1.0), (1, 2.0)], "seconds/b": [(0, 1.0), (1, float("nan"))], "reward": [(0, 9.0)]}
    )
    assert [(each.name, each.seconds, each.share) for each in found] == [("a", 3.0, 75.0), ("b", 1.0, 25.0)]
    assert phases({"seconds/a": [(0, 0.0)], "reward": [(0, 1.0)]}) == []


def test_a_running_stage_grows_until_its_last_heartbeat(store: LocalStore, tmp_path: Path) -> None:
    ref, now = ref_of("rl", "rl"), datetime.now(UTC)
    start = now - timedelta(seconds=100)
    write_start(
        store, RunStart(run_id="live", recipe={"name": "live"}, overrides=(), started_at=start, nodes={"rl": ref})
    )
    lines = b'{"step": 0, "time": 1.0, "seconds/generate": 3.0}\n'
    LiveFiles(store, ref).put("metrics.jsonl", lines)
    lease = take_lease(store, lease_path(ref))
    assert isinstance(lease, Lease)
    with lease:
        holder = live_holder(store, ref)
        assert holder is not None
        running = attempt(0, 0, "live").model_copy(
            update={
                "id": holder.id,
                "started_at": start,
                "seen_at": start + timedelta(seconds=50),
                "outcome": "running",
            }
        )
        Attempts(store, ref).write(running)
        lane = lane_of(page_of(store, tmp_path, "live"), "rl")
    ((outcome, left, width),) = bars(lane)
    assert (outcome, left) == ("running", 0.0)
    assert 40 < width < 50.1  # of 100 seconds, and those that this test took
    assert "generate 3.0 s (100 %)" in lane
    killed = lane_of(page_of(store, tmp_path, "live"), "rl")  # whose lease nobody holds
    assert [bar[0] for bar in bars(killed)] == ["killed"]


def test_text_of_attempts_and_phases_is_never_markup(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    line = json.dumps({"step": 0, "time": 1.0, f"seconds/{HOSTILE}": 1.0})
    (tmp_path / "d" / "metrics.jsonl").write_text(line + "\n", encoding="utf-8")
    publish(store, ref_of("rl", "rl"), tmp_path / "d")
    tried = attempt(0, 60, outcome="failed", reason=HOSTILE)
    record(store, [NodeRecord(name=HOSTILE, ref=ref_of("rl", "rl"), outcome="computed", attempts=(tried,))])
    page = page_of(store, tmp_path, "made")
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert") >= 4


def lines(attempts: Sequence[Attempt], seconds: float = 100.0, started: float = 0.0) -> TimeLine:
    """The time line of a run with one stage."""
    ref = ref_of("rl", "rl")
    started_at = AT + timedelta(seconds=started)
    nodes = [NodeView("rl", ref, "computed", None)]
    return time_line("made", started_at, AT + timedelta(seconds=seconds), nodes, {"rl": attempts}, {})


def test_attempts_of_other_runs_are_shown_as_far_as_they_fall_into_the_run() -> None:
    line = lines([attempt(-900, -800, "other"), attempt(-50, 20, "other"), attempt(90, 150, "other")])
    assert [(bar.left, bar.width, bar.is_other) for bar in line.lanes[0].bars] == [(0, 20, True), (90, 10, True)]
    assert "of another run" in line.lanes[0].bars[0].text
    assert line.lanes[0].gap is None


def test_a_run_that_was_started_again_begins_with_its_first_attempt() -> None:
    line = lines([attempt(-300, -200, outcome="killed"), attempt(0, 100)])
    assert line.seconds == 400
    assert [(bar.left, bar.width) for bar in line.lanes[0].bars] == [(0, 25), (75, 25)]
    assert [seconds for _, seconds in line.ticks] == [0, 120, 240, 360]
    assert line.ticks[1][0] == line.tick == 30


def test_a_run_of_no_time_and_no_attempt_has_a_line() -> None:
    line = lines([], seconds=0)
    assert (line.seconds, line.lanes[0].bars, line.lanes[0].summary) == (1.0, [], "computed")
    instant = lines([attempt(0, 0, waited=5.0)], seconds=0).lanes[0].bars
    assert [(bar.left, bar.width, bar.waited) for bar in instant] == [(0, 0, 0)]


def test_a_record_without_attempts_shows_that_of_the_manifest(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    publish(store, ref_of("a", "sft"), tmp_path / "d")  # a minute
    record(store, [NodeRecord(name="a", ref=ref_of("a", "sft"), outcome="computed")], seconds=120)
    assert bars(lane_of(page_of(store, tmp_path, "made"), "a")) == [("published", 0.0, 50.0)]
