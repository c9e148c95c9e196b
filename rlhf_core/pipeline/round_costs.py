"""Costs of the rounds of a loop: the attempts at all that each was made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import attempts_at
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundEnd, Rounds


def loop_attempts(repository: ArtifactRepository, rounds: Rounds) -> list[Attempt]:
    """Return the attempts of all rounds of a loop, also of those that were skipped or have not ended."""
    attempts: list[Attempt] = []
    for end in rounds.ends():
        record = None if end.record is None else repository.stored_manifest(end.record)
        start = rounds.start_of(end.number)
        attempts += round_attempts(repository, end, record, None if start is None else start.started_at)
    if (unfinished := rounds.unfinished()) is not None:
        attempts += rounds.attempts(unfinished)
    return attempts


def round_attempts(
    repository: ArtifactRepository, end: RoundEnd, record: Manifest | None, started_at: datetime | None
) -> Sequence[Attempt]:
    """Return the attempts of a round that has ended.

    Of an earlier release, those since its start at what its record was made of, as far as the store still has them.
    """
    if end.attempts is not None:
        return end.attempts
    return () if record is None or started_at is None else list(_made_of(repository, record, started_at))


def _made_of(repository: ArtifactRepository, record: Manifest, began: datetime) -> Iterator[Attempt]:
    """Yield the attempts since `began` at what the record was made of."""
    seen, pending = {record.ref}, [record]
    while pending:
        manifest = pending.pop()
        if manifest.finished_at < began:
            continue
        attempts = attempts_at(repository.store, manifest.ref, manifest)
        yield from (each for each in attempts if each.started_at >= began)
        parents = dict.fromkeys(ref for ref in manifest.parents.values() if ref not in seen)
        seen.update(parents)
        pending += [parent for ref in parents if (parent := repository.stored_manifest(ref)) is not None]
