"""The verdict of a gate on the page of its run, and as an event."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, runtime, task
from prefect.artifacts import Artifact
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.gates import event_of
from flows.registry import decide
from flows.running import conclude
from rlhf_core.artifacts.aliases import Alias, read_alias
from rlhf_core.artifacts.gates import Gate
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.config.notify import Event
from rlhf_core.errors import StoreError
from rlhf_core.pipeline.gates import Judged
from rlhf_core.pipeline.prepare import Prepared, prepare
from tasks.stage import StageResult
from tests.rlhf_core.artifacts.manifests import gate, manifest
from tests.rlhf_core.graph.gate_recipe import write

pytestmark = pytest.mark.system


@task
def reused(result: StageResult) -> StageResult:
    return result


@flow
def concluding(prepared: Prepared, manifest: Manifest) -> str:
    """The end of a run whose only stage was the gate."""
    future = reused.submit(StageResult(manifest, reused=True, seconds=0.0))
    future.wait()
    conclude(prepared, [], datetime.now(UTC), {"gate": prepared.graph["gate"]}, {"gate": future})
    return str(runtime.flow_run.id)


@pytest.mark.slow("starts a Prefect server")
def test_a_candidate_that_waits_has_its_command_on_the_page_of_the_run(
    tmp_path: Path, local_store_url: str, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is approved in Prefect."""
    prepared = prepare(write(tmp_path), ["gate.approval=required"], store=local_store_url, call_functions=False)
    node = prepared.graph["gate"]
    candidate, baseline = (node.input_refs[name] for name in ("candidate", "baseline"))
    for ref in (candidate, baseline):
        prepared.repository.commit(manifest("model", ref.stage, key=ref.key))
    gate(prepared.repository, tmp_path / "verdict", candidate, baseline, approval="required", ref=node.ref)
    verdict = prepared.repository.manifest(node.ref)
    assert verdict is not None
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        run_id = concluding(prepared, verdict)
        shown = Artifact.get("gates")
    assert shown is not None
    assert shown.flow_run_id == UUID(run_id)
    assert "**gate: passed.**" in str(shown.data)
    assert f"alignment approve bot --candidate {candidate}" in str(shown.data)
    move = read_alias(prepared.store, "bot", "candidate")
    assert move is not None
    assert (move.manifest, move.by) == (candidate, f"run {run_id}")

    monkeypatch.setenv("ALIGNMENT_STORE", local_store_url)
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        with pytest.raises(StoreError, match="and no longer"):
            decide("bot", baseline.full, "approve", "Ann", "read fifty answers")
        decide("bot", candidate.full, "approve", "Ann", "read fifty answers")
    champion = read_alias(prepared.store, "bot", "champion")
    assert champion is not None
    assert (champion.manifest, champion.evidence.approved_by) == (candidate, "Ann")


@pytest.mark.parametrize(
    ("passed", "is_new", "waits", "event"),
    [
        (False, False, False, "refused"),
        (True, True, True, "waiting_for_approval"),
        (True, False, True, "waiting_for_approval"),
        (True, True, False, "promoted"),
        (True, False, False, None),  # of a run that only reuses the verdict
    ],
)
def test_the_verdict_of_a_gate_is_an_event(passed: bool, is_new: bool, waits: bool, event: Event | None) -> None:
    ref = manifest("model").ref
    verdict = Gate(ref, ref, ref, passed=passed, reason="why", needs_approval=waits)
    move = Alias(manifest=ref, previous=None, by="a", reason="why", sequence=1, moved_at=datetime.now(UTC))
    judged = Judged("gate", verdict, move if passed else None, is_new=is_new, waits=waits, next_step="")
    assert event_of(judged) == event
