"""Moves of aliases, the only ones: by compare-and-swap, kept, and for protected aliases with evidence."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from rlhf_core.artifacts.aliases import (
    NO_EVIDENCE,
    Alias,
    Evidence,
    alias_path,
    kept_sequences,
    move_path,
    moves_of,
    read_alias,
    read_move,
)
from rlhf_core.artifacts.deletions import wait_for_deletions
from rlhf_core.artifacts.gates import read_gate
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.protection import CHAMPION, read_protection
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.config.texts import is_blank
from rlhf_core.errors import ConflictError, IntegrityError, StoreError, one_line


def move_alias(
    store: Store,
    model: str,
    alias: str,
    to: ArtifactRef,
    *,
    by: str,
    reason: str,
    seen: int | None = None,
    evidence: Evidence = NO_EVIDENCE,
) -> Alias:
    """Point `alias` at `to`, and keep the move before it.

    seen: the sequence number that the caller's decision was based on, 0 if there was no alias; None: any.
    Raises StoreError if the evidence is not what it says, or, for a protected alias, is none, or if a garbage
    collection deletes the artifact at this moment; ConflictError if another process has moved the alias since. Not
    retried: the caller has to decide again.
    """
    path = alias_path(model, alias)
    stored = store.get_tagged(path)
    old = None if stored is None else Alias.parse(path, stored[0])
    if seen is not None and seen != (0 if old is None else old.sequence):
        raise ConflictError(_moved_meanwhile(model, alias, old))
    _require_evidence(store, model, alias, old, to, evidence, reason)
    # Not those of the newest move alone: an alias that was deleted, or is of a backup, has a history too.
    sequence = 1 + max([0 if old is None else old.sequence, *kept_sequences(store, model, alias)])
    new = Alias(
        manifest=to,
        previous=None if old is None else old.manifest,
        by=by,
        reason=reason,
        sequence=sequence,
        moved_at=datetime.now(UTC),
        evidence=evidence,
        id=uuid.uuid4().hex,
    )
    data = new.model_dump_json(indent=1).encode()
    try:
        if stored is not None and old is not None:
            _keep(store, move_path(model, alias, old.sequence), stored[0])
        store.put_if_unchanged(path, data, None if stored is None else stored[1])
    except ConflictError as error:
        now = read_alias(store, model, alias)
        if new not in (now, read_move(store, move_path(model, alias, sequence))):
            raise ConflictError(_moved_meanwhile(model, alias, now)) from error
        # It is our own write, retried because its response was lost; perhaps it was moved on since.
    needed = [to] if evidence.gate is None else [to, evidence.gate]
    wait_for_deletions(store, [ref.path for ref in needed])
    for ref in needed:
        require_whole(store, ref)
    return new


def roll_back(
    store: Store, model: str, alias: str = CHAMPION, *, by: str, reason: str, seen: int | None = None
) -> Alias:
    """Point `alias` at the model before the present one; a second call goes back one further.

    seen: as for `move_alias`.
    Raises StoreError if there is none before it, or its files are gone; ConflictError as `move_alias`.
    """
    moves = moves_of(store, model, alias)
    if not moves:
        raise StoreError(f"there is no alias {model}/{alias}: `alignment log {model}` lists those of the model")
    present = moves[0]
    if seen is not None and seen != present.sequence:
        raise ConflictError(_moved_meanwhile(model, alias, present))
    before = model_before(moves)
    if before is None:
        raise StoreError(f"no model is known that {model}/{alias} pointed at before {present.manifest}")
    at, target = before
    require_whole(store, target)
    evidence = Evidence(restores=at)
    return move_alias(store, model, alias, target, by=by, reason=reason, seen=present.sequence, evidence=evidence)


def model_before(newest_first: Sequence[Alias]) -> tuple[int, ArtifactRef] | None:
    """Return the model that a rollback restores, and the number of the move to it; None if none is known.

    newest_first: all moves of the alias, at least one.
    """
    moves, present = {move.sequence: move for move in newest_first}, newest_first[0]
    at, target = present.evidence.restores or present.sequence, present.manifest
    while target == present.manifest:
        later, sequence = moves.get(at), max((number for number in moves if number < at), default=0)
        earlier = moves.get(sequence)
        if earlier is not None:
            at, target = earlier.evidence.restores or sequence, earlier.manifest
        elif later is not None and later.previous is not None:  # moved by a release that kept the last move alone
            at, target = at - 1, later.previous
        else:
            return None
    return at, target


def require_whole(store: Store, ref: ArtifactRef) -> None:
    """Raise StoreError for an artifact that is not in the store, or whose files are gone."""
    if ArtifactRepository(store).manifest(ref) is None:
        raise StoreError(f"{ref}, or a file of it, is gone from the store: run its recipe again")


def _keep(store: Store, path: str, data: bytes) -> None:
    try:
        store.put_if_absent(path, data)
    except ConflictError as error:
        if store.get(path) != data:  # else a process kept it that has replaced it, or was killed before it did
            raise IntegrityError(
                f"{store.url}: {path} holds another move than expected, so the history is damaged: rename the file in "
                "the store, and try again"
            ) from error


def _require_evidence(
    store: Store, model: str, alias: str, present: Alias | None, to: ArtifactRef, evidence: Evidence, reason: str
) -> None:
    """Raise StoreError for evidence that does not allow this move of this alias."""
    name = f"{model}/{alias}"
    gate = None if evidence.gate is None else read_gate(store, evidence.gate)
    if gate is not None and not (gate.passed and gate.candidate == to):
        passed = f"is of {gate.candidate}" if gate.candidate != to else "refused it"
        raise StoreError(f"{name}: the gate {gate.ref} is not evidence for {to}: it {passed}")
    if evidence.restores is not None and to not in _models_at(store, model, alias, evidence.restores):
        raise StoreError(f"{name}: its move {evidence.restores} was not to {to}, so this is not a rollback")
    if evidence.approved_by and (is_blank(evidence.approved_by) or is_blank(reason)):
        raise StoreError(f"{name}: an approval needs a name and a reason: --approve-by NAME --reason WHY")
    if evidence.approved_by or evidence.restores is not None or not read_protection(store, model).protects(alias):
        return
    wanted = (
        f"{name} is protected: it is moved by `alignment promote` after a passed gate of the model, or with "
        "--approve-by NAME --reason WHY"
    )
    if gate is None:
        raise StoreError(f"{wanted}; for {to} there is no such evidence")
    if present is not None and gate.baseline != present.manifest:
        raise StoreError(f"{wanted}; {gate.ref} compared {to} with {gate.baseline}, and {name} is {present.manifest}")
    if gate.needs_approval:
        raise StoreError(f"{wanted}; {gate.ref} needs a person too: `alignment approve {model}`")
    earlier = next((move for move in moves_of(store, model, alias) if move.evidence.gate == gate.ref), None)
    if earlier is not None:
        raise StoreError(
            f"{wanted}; by {gate.ref} the alias was moved before (move {earlier.sequence}), and moved back since"
        )


def _models_at(store: Store, model: str, alias: str, sequence: int) -> list[ArtifactRef]:
    """Return the model that the move `sequence` pointed at, also where only the move after it was kept."""
    moves = {move.sequence: move for move in moves_of(store, model, alias)}
    if sequence in moves:
        return [moves[sequence].manifest]
    after = moves.get(sequence + 1)
    return [] if after is None or after.previous is None else [after.previous]


def _moved_meanwhile(model: str, alias: str, now: Alias | None) -> str:
    if now is None:
        where = "is gone"
    else:
        where = f"points at {now.manifest} since {one_line(now.by)} moved it ({one_line(now.reason)})"
    return f"the alias {model}/{alias} was moved by another process: it {where}; read it again before moving it"
