"""The attempts at an artifact, in its folder of the store: also those that failed, were stopped or were killed.

`<artifact>/attempts/<start>-<id>.json`: a document per attempt, which its job writes when it has the lease, with each
heartbeat, and at its end. So a job that is killed loses what it took since its last heartbeat.
"""

from __future__ import annotations

from datetime import datetime

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.leases import live_holder
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store


class Attempts:
    """The attempts at one artifact. Each document has one writer, but for those of jobs that have died."""

    def __init__(self, store: Store, ref: ArtifactRef) -> None:
        self._store = store
        self._ref = ref

    def write(self, attempt: Attempt) -> None:
        self._store.put(
            f"{self._folder}{document_name(attempt.started_at, attempt.id)}.json",
            attempt.model_dump_json(indent=1).encode(),
        )

    def all(self) -> list[Attempt]:
        """Return the attempts in the order of their starts; one whose job died before it had published is `killed`.

        Raises IntegrityError for a damaged document.
        """
        attempts = self._stored()
        if all(attempt.outcome != "running" for attempt in attempts):
            return attempts
        holder = live_holder(self._store, self._ref)
        alive = "" if holder is None else holder.id
        return [self._ended(each) if each.outcome == "running" and each.id != alive else each for each in attempts]

    def close_dead(self, holder: str) -> list[Attempt]:
        """Store the ends of attempts whose jobs have died, and return all attempts. holder: the id of the lease's."""
        attempts = []
        for attempt in self._stored():
            if attempt.outcome == "running" and attempt.id != holder:
                attempt = self._ended(attempt)
                self.write(attempt)
            attempts.append(attempt)
        return attempts

    def _ended(self, attempt: Attempt) -> Attempt:
        """Return the attempt of a dead job as the manifest has it, if it died after that was stored, else `killed`."""
        manifest = ArtifactRepository(self._store).stored_manifest(self._ref)
        for published in () if manifest is None else manifest.attempts:
            if published.id == attempt.id:
                return published
        return attempt.model_copy(update={"outcome": "killed", "reason": "its job was killed, or its node was lost"})

    def _stored(self) -> list[Attempt]:
        attempts = []
        for path in self._store.list(self._folder):
            data = self._store.get(path)
            if data is not None:
                attempts.append(parsed(Attempt, data, path, "an attempt", "delete it in the store"))
        return attempts

    @property
    def _folder(self) -> str:
        return f"{self._ref.path}/attempts/"


def attempts_at(store: Store, ref: ArtifactRef, manifest: Manifest | None) -> list[Attempt]:
    """Return the attempts at an artifact, from its folder, else from its manifest: one for a manifest of earlier
    releases, which has the device seconds of all of them.
    """
    stored = Attempts(store, ref).all()
    if stored or manifest is None:
        return stored
    return list(manifest.attempts) or [_of_earlier_release(manifest)]


def attempt_of(manifest: Manifest) -> Attempt:
    """Return the attempt that published it; of a manifest of earlier releases, all attempts as one."""
    return manifest.attempts[-1] if manifest.attempts else _of_earlier_release(manifest)


def _of_earlier_release(manifest: Manifest) -> Attempt:
    seconds = (manifest.finished_at - manifest.started_at).total_seconds()
    devices = manifest.device_seconds / seconds if seconds > 0 else 0.0
    on_cpu = manifest.device in ("cpu", "none")
    return Attempt(
        id="", host="", device=manifest.device, gpus=0.0 if on_cpu else devices, cores=devices if on_cpu else 0.0,
        started_at=manifest.started_at, seen_at=manifest.finished_at, outcome="published",
        reason="of an earlier release, which kept the device seconds of all attempts as one number",
    )  # fmt: skip


def document_name(started_at: datetime, attempt: str) -> str:
    """Return a name that sorts by start. attempt: its id."""
    return f"{started_at:%Y%m%dT%H%M%S%f}-{attempt}"
