"""The record of a run."""

from datetime import UTC, datetime

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.pipeline.record import NodeRecord, RunRecord, read_record, write_record


def test_a_record_is_read_as_it_was_written_and_a_retry_replaces_it(store_url: str) -> None:
    store = open_store(store_url)
    assert read_record(store, "run-1") is None
    now = datetime(2026, 1, 2, tzinfo=UTC)
    ref = ArtifactRef(stage="sft", key="0" * 64)
    failed = RunRecord(
        run_id="run-1", recipe={"name": "r"}, overrides=("seed=1",), started_at=now, finished_at=now,
        nodes=(NodeRecord(name="sft", ref=ref, outcome="failed", error="no memory"),),
    )  # fmt: skip
    write_record(store, failed)
    assert read_record(store, "run-1") == failed
    assert not failed.succeeded
    computed = NodeRecord(name="sft", ref=ref, outcome="computed", seconds=2.5, metrics={"loss": 0.5})
    done = failed.model_copy(update={"nodes": (computed,)})
    write_record(store, done)
    assert read_record(store, "run-1") == done
    assert done.succeeded
