"""The report of a run: every artifact's manifest and metrics in, one HTML page out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.outputs import ReportConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.report.content import gather
from rlhf_core.report.page import render


def run(config: ReportConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    nodes = {name.removeprefix("node."): item for name, item in inputs.items()}
    content = gather(nodes, samples=config.samples)
    last = list(nodes.values())[-1].manifest
    page = render(content, title=config.title, revision=last.code_revision, libraries=last.libraries)
    folder = context.workdir / "report"
    folder.mkdir()
    (folder / "report.html").write_text(page, encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(asdict(content), indent=1), encoding="utf-8")
    return Output(Kind.REPORT, folder, metrics={"stages": len(content.stages)})
