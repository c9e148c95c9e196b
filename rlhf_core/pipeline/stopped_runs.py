"""Records of runs that wrote none: their process was killed, interrupted, or lost its machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import attempts_at
from rlhf_core.artifacts.leases import live_holder
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.pipeline.record import NodeRecord, RunRecord, RunStart

_QUIET = timedelta(minutes=5)  # between two stages, and before the first, nothing in the store tells that a run lives

# Returns whether a run follows the job of one of these artifacts now: tasks.followers.follows.
Follows = Callable[[Store, str, Collection[ArtifactRef]], bool]


def stopped_record(repository: ArtifactRepository, start: RunStart, follows: Follows) -> RunRecord | None:
    """Return the record of a run that has written none; None if it may be at work."""
    store, now = repository.store, datetime.now(UTC)
    if now - start.started_at < _QUIET:
        return None
    refs = list(start.nodes.values())
    if any(live_holder(store, ref) for ref in refs) or follows(store, start.run_id, refs):
        return None
    manifests = {name: repository.stored_manifest(ref) for name, ref in start.nodes.items()}
    attempts = {name: attempts_at(store, ref, manifests[name]) for name, ref in start.nodes.items()}
    own = [each for of_node in attempts.values() for each in of_node if each.run_id == start.run_id]
    seen_at = max([start.started_at, *(each.seen_at for each in own)])
    if now - seen_at < _QUIET:
        return None
    return RunRecord(
        run_id=start.run_id, recipe=start.recipe, overrides=start.overrides, tags=start.tags, stopped=True,
        started_at=start.started_at, finished_at=seen_at,
        nodes=tuple(_node(start, name, manifests[name], attempts[name]) for name in start.nodes),
    )  # fmt: skip


def _node(start: RunStart, name: str, manifest: Manifest | None, attempts: Sequence[Attempt]) -> NodeRecord:
    ref, last = start.nodes[name], attempts[-1] if attempts else None
    if manifest is not None:
        return NodeRecord(
            name=name, ref=ref, outcome="reused" if name in start.reused else "computed", metrics=manifest.metrics,
            attempts=tuple(attempts),
        )  # fmt: skip
    if last is None or last.run_id != start.run_id:
        return NodeRecord(name=name, ref=ref, outcome="not run", attempts=tuple(attempts))
    error = f"{last.outcome}: {last.reason}" if last.reason else last.outcome
    return NodeRecord(name=name, ref=ref, outcome="failed", error=error, attempts=tuple(attempts))
