"""The record of a run."""

from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console

from deployments.cli.tables import comparison_tables
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.pipeline.record import NodeRecord, RunRecord, read_record, write_record

pytestmark = pytest.mark.parts


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


def test_models_are_compared_within_each_evaluation_stage() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    nodes = tuple(
        NodeRecord(
            name=name, ref=ArtifactRef(stage=stage, key=f"{index}" * 64), outcome="computed", metrics={"pass@1": value}
        )
        for index, (name, stage, value) in enumerate([
            ("rl", "rl", 0.0), ("evaluation.rl", "evaluation", 0.25), ("evaluation.sft", "evaluation", 0.5),
            ("far.rl", "evaluation", 0.75), ("far.a", "evaluation", 0.125), ("far.b", "evaluation", 0.25),
            ("far.c", "evaluation", 0.5), ("far.d", "evaluation", 1.0),
        ])
    )  # fmt: skip
    record = RunRecord(run_id="r", recipe={}, overrides=(), started_at=now, finished_at=now, nodes=nodes)
    assert record.evaluations == {
        "evaluation": {"rl": {"pass@1": 0.25}, "sft": {"pass@1": 0.5}},
        "far": {
            "rl": {"pass@1": 0.75}, "a": {"pass@1": 0.125}, "b": {"pass@1": 0.25}, "c": {"pass@1": 0.5},
            "d": {"pass@1": 1.0},
        },
    }  # fmt: skip
    shown = StringIO()
    tables = list(comparison_tables(record))
    assert [str(table.title).partition(":")[0] for table in tables] == ["evaluation", "far", "far"], (
        "a line has room for four"
    )
    for table in tables:
        Console(width=100, file=shown).print(table)
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.getvalue().splitlines()]
    assert [line for line in lines if "pass@1" in line] == [
        "pass@1 0.250 0.500", "pass@1 0.750 0.125 0.250 0.500", "pass@1 1"
    ]  # fmt: skip
