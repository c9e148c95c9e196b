"""From a passed gate to the champion: `candidate` is moved by gates, another alias by a promotion or an approval.

registry/<model>/decisions/<gate's key>.json    approval or rejection of the candidate that a gate passed, written once
"""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import AwareDatetime

from rlhf_core.artifacts.aliases import Alias, Evidence, moves_of, read_alias, registry_path
from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.gates import Gate, read_gate
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.protection import CANDIDATE, CHAMPION
from rlhf_core.artifacts.registry import move_alias, require_whole
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.config.texts import is_blank
from rlhf_core.errors import ConflictError, StoreError, one_line

_ATTEMPTS = 100  # each fails only because another process has moved the alias


class Decision(Config):
    gate: ArtifactRef
    candidate: ArtifactRef
    approved: bool
    by: str
    reason: str
    decided_at: AwareDatetime


def propose(store: Store, model: str, gate_ref: ArtifactRef, *, by: str) -> Alias:
    """Move `candidate` to the model that a gate has passed. A gate moves it once: a second call returns that move."""
    gate = read_gate(store, gate_ref)
    for _ in range(_ATTEMPTS):
        moves = moves_of(store, model, CANDIDATE)
        made = next((move for move in moves if move.evidence.gate == gate_ref), None)
        if made is not None:
            return made
        try:
            return move_alias(
                store, model, CANDIDATE, gate.candidate,
                by=by, reason=gate.reason, seen=moves[0].sequence if moves else 0, evidence=Evidence(gate=gate_ref),
            )  # fmt: skip
        except ConflictError:
            continue
    raise ConflictError(f"{model}/{CANDIDATE} keeps being moved by other processes: run the recipe again")


def promote(
    store: Store,
    model: str,
    to: str = CHAMPION,
    *,
    by: str,
    reason: str,
    approved_by: str = "",
    expected: ArtifactRef | None = None,
) -> Alias | None:
    """Point the alias `to` at the candidate. Returns None if it does so already.

    expected: the candidate that the caller has looked at; None: any.
    Raises StoreError if there is no candidate, it was rejected, or lacks what a protected alias needs; ConflictError if
    another process has moved the alias meanwhile.
    """
    candidate, present = _candidate(store, model, expected), read_alias(store, model, to)
    if to == CANDIDATE:
        raise StoreError(f"{model}/{CANDIDATE} is the source of a promotion: pass another alias as --to")
    if present is not None and present.manifest == candidate.manifest:
        return None
    decision = decision_on(store, model, candidate)
    if decision is not None and not decision.approved:
        raise StoreError(
            f"{model}/{CANDIDATE}, {candidate.manifest}, was rejected by {one_line(decision.by)} "
            f"({one_line(decision.reason)}): run the recipe for another one"
        )
    require_whole(store, candidate.manifest)
    return move_alias(
        store, model, to, candidate.manifest, by=by, reason=reason or candidate.reason,
        seen=0 if present is None else present.sequence,
        evidence=Evidence(gate=candidate.evidence.gate, approved_by=approved_by),
    )  # fmt: skip


def waiting(store: Store, model: str) -> Alias | None:
    """Return the move of the candidate that waits for a person; None if none does."""
    candidate, champion = read_alias(store, model, CANDIDATE), read_alias(store, model, CHAMPION)
    if candidate is None or candidate.evidence.gate is None or decision_on(store, model, candidate) is not None:
        return None
    if champion is not None and champion.manifest == candidate.manifest:
        return None
    return candidate if read_gate(store, candidate.evidence.gate).needs_approval else None


def approve(
    store: Store, model: str, *, by: str, approved_by: str, reason: str, expected: ArtifactRef | None = None
) -> Alias:
    """Approve the waiting candidate, and point `champion` at it. A second call completes one that was killed.

    by: who calls it; expected: the candidate that the approver has looked at; None: any.
    Raises StoreError if none waits, or it was compared with another model than the champion; ConflictError if it was
    rejected, or another process moves the champion meanwhile.
    """
    candidate, gate = _asked(store, model, expected)
    champion = read_alias(store, model, CHAMPION)
    if champion is not None and champion.manifest == candidate.manifest:
        raise StoreError(f"{model}/{CHAMPION} is {candidate.manifest} already")
    if champion is not None and champion.manifest != gate.baseline:
        raise StoreError(
            f"{candidate.manifest} was compared with {gate.baseline}, and {model}/{CHAMPION} is {champion.manifest} "
            "since: run the recipe again"
        )
    if any(move.evidence.gate == gate.ref for move in moves_of(store, model, CHAMPION)):
        raise StoreError(f"{candidate.manifest} was {model}/{CHAMPION} by this approval, and was moved back since")
    require_whole(store, candidate.manifest)
    decision = _decide(store, model, candidate, gate, approved=True, by=approved_by, reason=reason or gate.reason)
    return move_alias(
        store, model, CHAMPION, candidate.manifest, by=by, reason=decision.reason,
        seen=0 if champion is None else champion.sequence,
        evidence=Evidence(gate=gate.ref, approved_by=decision.by),
    )  # fmt: skip


def reject(store: Store, model: str, *, by: str, reason: str, expected: ArtifactRef | None = None) -> Decision:
    """Reject the waiting candidate, for a reason. A second call returns the first decision.

    Raises StoreError if none waits, ConflictError if it was approved.
    """
    if is_blank(reason):
        raise StoreError("a rejection needs a reason, by --reason")
    candidate, gate = _asked(store, model, expected)
    return _decide(store, model, candidate, gate, approved=False, by=by, reason=reason)


def decision_on(store: Store, model: str, candidate: Alias) -> Decision | None:
    """Return what a person has decided about a move of the candidate; None if nothing."""
    if candidate.evidence.gate is None:
        return None
    path = _decision_path(model, candidate.evidence.gate)
    data = store.get(path)
    return None if data is None else parsed(Decision, data, path, "a decision", "delete it, and decide again")


def _candidate(store: Store, model: str, expected: ArtifactRef | None) -> Alias:
    candidate = read_alias(store, model, CANDIDATE)
    if candidate is None:
        raise StoreError(f"{model} has no candidate: a stage `gate` with `model: {model}` moves {model}/{CANDIDATE}")
    if expected not in (None, candidate.manifest):
        raise StoreError(f"{model}/{CANDIDATE} is {candidate.manifest} now, and no longer {expected}: look at it first")
    return candidate


def _asked(store: Store, model: str, expected: ArtifactRef | None) -> tuple[Alias, Gate]:
    """Return the candidate that waits, or has been decided on, and its gate."""
    candidate = _candidate(store, model, expected)
    gate = None if candidate.evidence.gate is None else read_gate(store, candidate.evidence.gate)
    if gate is None or not gate.needs_approval:
        raise StoreError(
            f"{model}/{CANDIDATE}, {candidate.manifest}, needs no approval: `alignment promote {model}` promotes it"
        )
    return candidate, gate


def _decide(
    store: Store, model: str, candidate: Alias, gate: Gate, *, approved: bool, by: str, reason: str
) -> Decision:
    """Return the decision on a candidate, which is the first one of its kind. Raises ConflictError for the opposite."""
    decision = Decision(
        gate=gate.ref, candidate=candidate.manifest, approved=approved, by=by, reason=reason,
        decided_at=datetime.now(UTC),
    )  # fmt: skip
    try:
        store.put_if_absent(_decision_path(model, gate.ref), decision.model_dump_json(indent=1).encode())
    except ConflictError as error:
        stored = decision_on(store, model, candidate)
        if stored is None or stored.approved != approved:
            what = "" if stored is None else f" by {one_line(stored.by)} ({one_line(stored.reason)})"
            verb = "rejected" if approved else "approved"
            raise ConflictError(f"{candidate.manifest} was {verb}{what} before") from error
        return stored
    return decision


def _decision_path(model: str, gate: ArtifactRef) -> str:
    return f"{registry_path(model)}/decisions/{gate.key}.json"
