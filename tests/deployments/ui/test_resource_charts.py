"""The charts of a stage's processes: over minutes, over all attempts, and with no line left out."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.resources import AttemptUses, ProcessUses, uses_path
from rlhf_core.pipeline.record import RunStart, write_start
from rlhf_core.report.charts import curve_charts
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.page import with_run
from rlhf_core.report.resource_charts import resource_charts
from rlhf_core.report.run_part import RunPart
from tests.deployments.ui.served import browsing, data_of

pytestmark = pytest.mark.parts

AT = datetime(2026, 11, 1, tzinfo=UTC)
RL = ArtifactRef(stage="rl", key="a" * 64)
GIB = 2**30


def attempt(minutes: int, **gpus: float | None) -> AttemptUses:
    """Two samples of each process, 30 and 60 seconds after a start so many minutes after the first one's."""
    processes = {
        name: ProcessUses(
            seconds=(30.0, 60.0), cores=(1.0, 2.0), host_bytes=(GIB, 3 * GIB), gpu_share=(None, share),
            gpu_bytes=(None, None if share is None else GIB),
        )
        for name, share in gpus.items()
    }  # fmt: skip
    return AttemptUses(started_at=AT + timedelta(minutes=minutes), processes=processes)


def test_a_chart_has_each_process_over_all_attempts() -> None:
    charts = resource_charts([attempt(0, job=None, rank=0.5), attempt(10, job=None)])
    assert [(chart["title"], chart["x"]) for chart in charts] == [
        (title, "minutes") for title in ("cores in use", "memory, GiB", "GPUs busy, share", "GPU memory, GiB")
    ]
    cores, memory, busy, _ = (chart["lines"] for chart in charts)
    assert cores[0] == {"name": "job", "x": [0.5, 1.0, 10.5, 11.0], "y": [1.0, 2.0, 1.0, 2.0]}
    assert memory[1] == {"name": "rank", "x": [0.5, 1.0], "y": [1.0, 3.0]}
    assert busy == [{"name": "rank", "x": [1.0], "y": [0.5]}]
    assert resource_charts([]) == []


def test_curves_beyond_ten_are_in_further_charts() -> None:
    curves = {f"reward/{number:02}": [(0.0, 1.0), (1.0, 2.0)] for number in range(23)}
    charts = curve_charts({"rewards by name": curves, "loss": {"loss": [(0.0, 1.0)]}})
    assert [(chart["title"], len(chart["lines"])) for chart in charts] == [
        ("rewards by name, lines 1 to 10 of 23", 10), ("rewards by name, lines 11 to 20 of 23", 10),
        ("rewards by name, lines 21 to 23 of 23", 3), ("loss", 1),
    ]  # fmt: skip
    assert charts[2]["lines"][-1]["name"] == "reward/22"


def test_the_page_of_a_stage_draws_them_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    write_start(store, RunStart(run_id="live", recipe={"name": "r"}, overrides=(), started_at=AT, nodes={"rl": RL}))
    with browsing(store, tmp_path / "cache") as browser:
        assert "Resources" not in browser.get("/runs/live/rl").text
        store.put(uses_path(RL, AT, "a"), attempt(0, job=None).model_dump_json().encode())
        store.put(f"{RL.path}/live/metrics.jsonl", b'{"step": 0, "reward": 1}\n{"step": 1, "reward": 2}\n')
        page = browser.get("/runs/live/rl").text
        run = browser.get("/runs/live").text
    found = [json.loads(each) for each in re.findall(r"data-charts='([^']*)'", page)]
    assert [[chart["title"] for chart in each["charts"]] for each in found] == [
        ["reward and KL"], ["cores in use", "memory, GiB"]
    ]  # fmt: skip
    assert "<summary>Cores, memory and GPUs in use, by stage</summary>" in run
    assert [chart["title"] for chart in data_of(run, "charts")["charts"]] == ["cores in use", "memory, GiB"]
    assert page.count("/static/charts.js") == run.count("/static/charts.js") == 1
    assert page.index("charts.js") > page.rindex("data-charts")


def test_the_report_has_them_thinned_to_its_size() -> None:
    long = ProcessUses(
        seconds=tuple(map(float, range(2_000))), cores=(1.0,) * 2_000, host_bytes=(GIB,) * 2_000,
        gpu_share=(0.5,) * 2_000, gpu_bytes=(GIB,) * 2_000,
    )  # fmt: skip
    uses = {"rl": [AttemptUses(started_at=AT, processes={f"rank {number}": long for number in range(12)})]}
    part = RunPart(
        "made", "succeeded", AT, AT, True, (), "", [], [NodeView("rl", RL, "computed", None)], {}, [], None, {}, {},
        uses,
    )  # fmt: skip
    page = with_run("<!-- the run --><!-- end of the run -->", part)
    assert len(page) < 250_000
    (*_, last) = data_of(page, "charts")["charts"][0]["lines"][0]["x"]
    assert last == pytest.approx(1_999 / 60, abs=0.01)
