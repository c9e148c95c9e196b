"""The record of a run, and the figures that tables show of it."""

from datetime import UTC, datetime

from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.pipeline.record import NodeRecord, RunRecord, read_record, write_record
from rlhf_core.report.formatting import compared_metrics, main_figures, with_interval


def test_a_record_is_read_as_it_was_written_and_a_retry_writes_it_anew(store_url: str) -> None:
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


def test_figures() -> None:
    metrics = {"pass@1": 0.43125, "pass@1_low": 0.4, "pass@1_high": 0.46, "none": None, "rows": 12, "rate": 2e-5}
    assert main_figures("evaluation", metrics) == "pass@1 0.431, rows 12"
    assert main_figures("rl", metrics) == "pass@1 0.431, rows 12, rate 2e-05"
    assert with_interval(metrics, "pass@1") == "0.431 (0.400–0.460)"
    assert (with_interval(metrics, "rows"), with_interval(metrics, "none"), with_interval({}, "x")) == ("12", "–", "–")
    assert compared_metrics({"base": {"a": 1, "a_low": 0}, "rl": {"a": 2, "b": 3}}) == ["a", "b"]
