"""The report of a run as it is stored beside the run's record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.ui.demo import write_demo
from flows.report_link import store_report
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.record import newest_records
from tests.rlhf_core.stages.made_reports import reported

pytestmark = pytest.mark.parts


def test_the_run_s_part_is_put_into_its_report_and_the_content_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ALIGNMENT_WORKDIR", str(tmp_path / "work"))
    repository = ArtifactRepository(LocalStore(tmp_path / "store"))
    write_demo(repository, runs=2, steps=3)
    records = [record for _, record in newest_records(repository.store) if not isinstance(record, Exception)]
    record = max(records, key=lambda record: record.started_at)
    report = reported(repository, {node.name: node.ref for node in record.nodes}, "sums")
    store_report(repository, report.ref, record)
    folder = f"runs/{record.run_id}"
    page, content = (repository.store.get(f"{folder}/{name}") for name in ("report.html", "report.json"))
    assert page is not None
    assert content is not None
    text = " ".join(page.decode().partition("<main>")[2].partition("</main>")[0].split())
    assert f'run {record.run_id} <span class="succeeded">succeeded</span>' in text
    assert '<td class="nowrap computed">computed</td>' in text
    assert '<a href="#stage-rl/steps/3">completions of the last step</a>' in text
    assert "<td>rl.grpo.optimizer.learning_rate</td><td>0.001</td><td>0.002</td>" in text
    assert '<div class="timeline">' in text
    assert json.loads(content)["model"]["node"] == "rl"
