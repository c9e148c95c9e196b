"""Reads runs from the store to compare them (report/run_diff.py)."""

from __future__ import annotations

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import StoreError
from rlhf_core.pipeline.record import NodeRecord, known_run
from rlhf_core.pipeline.run_costs import prices_of_run
from rlhf_core.pipeline.stopped_runs import Follows, stopped_record
from rlhf_core.report.run_diff import ComparedRun, RunStage, is_evaluation
from rlhf_core.stages.job_context import node_cache
from rlhf_core.tracking.protocol import SAMPLES_FILE, read_jsonl


def read_compared_run(repository: ArtifactRepository, run_id: str, follows: Follows) -> ComparedRun:
    """Return the run with its manifests and the rows of its evaluations; a result that is gone counts as absent.

    Raises StoreError if the store does not know the run, or is damaged, or the run has not ended.
    """
    record, start = known_run(repository.store, run_id)
    if record is None and start is not None:
        record = stopped_record(repository, start, follows)
    if record is None:
        raise StoreError(f"the run {run_id} has not ended: compare runs that have, which `alignment runs` lists")
    stages = {node.name: _stage(repository, node) for node in record.nodes}
    rows = {
        name: read_jsonl(repository.fetch(stage.ref, node_cache(), only=[SAMPLES_FILE]) / SAMPLES_FILE)
        for name, stage in stages.items()
        if is_evaluation(stage)
    }
    prices = prices_of_run(record.recipe)
    return ComparedRun(
        run_id, record.recipe, record.overrides, record.started_at, record.finished_at, stages, rows,
        record.costs(prices), prices,
    )  # fmt: skip


def _stage(repository: ArtifactRepository, node: NodeRecord) -> RunStage:
    has_result = node.outcome in ("reused", "computed")
    return RunStage(node.ref, node.outcome, repository.manifest(node.ref) if has_result else None)
