"""A person's decision on the candidate of a model, taken in Prefect. No worker is held until it is."""

from __future__ import annotations

from prefect import flow, runtime

from flows.parameters import ApproverName, CandidateName, DecisionName, ModelName, ReasonText
from rlhf_core.artifacts import promotion
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.protection import CHAMPION
from rlhf_core.artifacts.repository import ArtifactRepository


@flow(name="registry")
def decide(
    model: ModelName, candidate: CandidateName, decision: DecisionName, by: ApproverName, reason: ReasonText
) -> str:
    """Approve or reject the candidate of a model, after a gate has passed it. Returns what was decided.

    An approved candidate becomes `champion`. Raises StoreError if another candidate waits, or none.

    Args:
        model: name in the registry, as in `alignment log MODEL`
        candidate: artifact that you have looked at, stage/key
        decision: approve moves `champion` to it, reject keeps it from being promoted
        by: your name, kept with the decision
        reason: what you looked at, kept with the decision
    """
    store = open_store(store_url())
    expected = ArtifactRepository(store).resolve(candidate)
    caller = f"run {runtime.flow_run.id}"
    if decision == "reject":
        rejected = promotion.reject(store, model, by=by, reason=reason, expected=expected)
        return f"{rejected.candidate} is rejected by {rejected.by}: {rejected.reason}"
    moved = promotion.approve(store, model, by=caller, approved_by=by, reason=reason, expected=expected)
    return f"{model}/{CHAMPION} is {moved.manifest}: {moved.reason}"
