"""The report of a run: every artifact's manifest and metrics in, one HTML page out, and its content as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from rlhf_core.artifacts.logged_rollouts import LoggedStep, decode_step, logged_files
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.outputs import ReportConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.report.content import gather
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.page import render
from rlhf_core.tracking.protocol import REPORT_FILE, REPORT_JSON_FILE


def run(config: ReportConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    nodes = {name.removeprefix("node."): item for name, item in inputs.items()}
    content = gather(nodes, samples=config.samples)
    last = list(nodes.values())[-1].manifest
    page = render(
        content, [NodeView(name, item.manifest.ref, "done", item.manifest) for name, item in nodes.items()],
        {name: _first_and_last_step(item, context) for name, item in nodes.items()},
        title=config.title, revision=last.code_revision, libraries=last.libraries,
    )  # fmt: skip
    folder = context.workdir / "report"
    folder.mkdir()
    (folder / REPORT_FILE).write_text(page, encoding="utf-8")
    (folder / REPORT_JSON_FILE).write_text(json.dumps(asdict(content), indent=1), encoding="utf-8")
    return Output(Kind.REPORT, folder, metrics={"stages": len(content.stages)})


def _first_and_last_step(item: Input, context: StageContext) -> list[LoggedStep]:
    """Return the first and the last step of which rollouts are logged; of the log only these are fetched."""
    logged = logged_files(item.manifest)
    if not logged:
        return []
    steps = sorted({min(logged), max(logged)})
    folder = context.fetch(item.manifest.ref, only=[logged[step] for step in steps]).folder
    return [
        decode_step((folder / logged[step]).read_bytes(), f"{item.manifest.ref}: the rollouts of step {step}")
        for step in steps
    ]
