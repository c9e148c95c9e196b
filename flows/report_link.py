"""The report of a run, linked in the Prefect UI."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from rlhf_core.artifacts.logged_rollouts import logged_files
from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.prepare import Prepared
from rlhf_core.pipeline.record import RunRecord, report_json_path, report_path
from rlhf_core.pipeline.run_view import inputs_of, node_view, run_of_record, run_part
from rlhf_core.report.formatting import compared_metrics, main_metrics, with_interval
from rlhf_core.report.page import with_run
from rlhf_core.tracking.protocol import REPORT_FILE, REPORT_JSON_FILE


def link_report(prepared: Prepared, record: RunRecord) -> None:
    """Store the run's report beside its record, and a summary with a link to it in Prefect."""
    reports = [node.ref for node in record.nodes if node.ref.stage == Kind.REPORT]
    lines = [f"# Run of the recipe {record.recipe['name']}", "", *_stages(record), "", *_comparison(record), ""]
    for ref in reports:
        store_report(prepared.repository, ref, record)
        path = report_path(record.run_id)
        if url := prepared.store.page_url(path):
            lines += [f"[Open the report with curves and samples]({url}) (this link is valid for a week)", ""]
        lines += [f"The report as a file: `alignment report {record.run_id}`. It is `{prepared.store.url}/{path}`."]
    create_markdown_artifact("\n".join(lines), key="report", description="What the run made, and its report")


def store_report(repository: ArtifactRepository, ref: ArtifactRef, record: RunRecord) -> None:
    """Store the report with the part about the run, and its content beside it."""
    run = run_of_record(record)
    with tempfile.TemporaryDirectory() as cache:
        folder = repository.fetch(ref, Path(cache))
        page = (folder / REPORT_FILE).read_text(encoding="utf-8")
        content = (folder / REPORT_JSON_FILE).read_bytes()
    nodes = [node_view(repository, run, name) for name in run.nodes]
    inputs = {node.name: inputs_of(repository, node) for node in nodes}
    logged = {
        node.name: max(steps) for node in nodes if node.manifest is not None and (steps := logged_files(node.manifest))
    }
    curves = json.loads(content)["curves"]
    part = run_part(repository, run, nodes, inputs, record.costs(run.prices), curves, logged)
    repository.store.put(report_path(record.run_id), with_run(page, part).encode())
    repository.store.put(report_json_path(record.run_id), content)


def _stages(record: RunRecord) -> list[str]:
    rows = ["| stage | | time | metrics |", "|---|---|---:|---|"]
    for node in record.nodes:
        rows.append(f"| {node.name} | {node.outcome} | {node.seconds:.1f} s | {main_metrics(node.metrics)} |")
    return rows


def _comparison(record: RunRecord) -> list[str]:
    rows = []
    for stage, models in record.evaluations.items():
        rows += [f"| {stage} | {' | '.join(models)} |", "|---|" + "---|" * len(models)]
        for name in compared_metrics(models):
            rows.append(f"| {name} | {' | '.join(with_interval(metrics, name) for metrics in models.values())} |")
        rows.append("")
    return rows
