"""Rounds of a loop in the store: their start and end. A loop has no other state.

loops/<loop>/<number>/start.json   written once, before the round's first job
loops/<loop>/<number>/end.json     written once; a round without it is finished by the next run of the loop
aliases/<loop>/accepted.json       the model that was accepted last, moved by compare-and-swap
leases/loops/<loop>.json           the process that runs a round, so that no other does
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Literal

from pydantic import AwareDatetime

from rlhf_core.artifacts.aliases import Evidence, read_alias
from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.documents import Document, parsed
from rlhf_core.artifacts.leases import Holder, Lease, holder_at, take_lease
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.config.stages.loop import ACCEPTED
from rlhf_core.errors import ConflictError

_NUMBER = re.compile(r"(?!000000)[0-9]{6}|[1-9][0-9]{6,15}")  # as `_path` writes it
Verdict = Literal["accepted", "refused", "skipped"]


class RoundStart(Config):
    number: int  # from 1
    accepted: ArtifactRef | None  # None: the model of the loop's stage `start`, since none was accepted yet
    alias_sequence: int  # of the alias `accepted` as it was then; 0: there was none
    previous_prompts: ArtifactRef | None  # of the round before, and through it of all rounds before
    prompts: ArtifactRef | None = None  # of this round; None: not known yet
    nodes: tuple[ArtifactRef, ...] = ()  # all that it has been made of, with other settings before too
    started_at: AwareDatetime
    run_id: str


class RoundEnd(Config):
    number: int
    verdict: Verdict
    reason: str
    record: ArtifactRef | None  # its artifact `round`; None: it was skipped
    candidate: ArtifactRef | None
    prompts: ArtifactRef | None  # of this round, or where it was skipped before it had any, of the round before
    ended_at: AwareDatetime
    run_id: str  # that finished it
    attempts: tuple[Attempt, ...] | None = None  # at its nodes, since its start; None: of an earlier release


class Rounds:
    """The rounds of the loop `name`."""

    def __init__(self, store: Store, name: str):
        self._store = store
        self._name = name

    def take(self) -> Lease | Holder:
        """Return the lease to run a round, its heartbeat not started yet, or the process that runs one."""
        return take_lease(self._store, self._lease_path)

    def count(self) -> int:
        """Number of rounds started. Rounds with only an end count: a number used twice would use its prompts twice."""
        return max(self._numbers(), default=0)

    def start_of(self, number: int) -> RoundStart | None:
        return self._read(self._path(number, "start"), RoundStart)

    def end_of(self, number: int) -> RoundEnd | None:
        return self._read(self._path(number, "end"), RoundEnd)

    def ends(self) -> list[RoundEnd]:
        """Return the ends of all finished rounds, in order."""
        return [end for number in self._numbers() if (end := self.end_of(number)) is not None]

    def holder(self) -> str:
        """Describe the process that runs a round of the loop now; empty if none does."""
        return holder_at(self._store, self._lease_path)

    def unfinished(self) -> RoundStart | None:
        """Return the round that was started and has not ended."""
        last = self.count()
        return self.start_of(last) if last and self.end_of(last) is None else None

    def current(self, run_id: str = "") -> RoundStart:
        """Return the unfinished round, or else the next one, which is not stored yet."""
        last = self.count()
        if last and (end := self.end_of(last)) is None:
            unfinished = self.start_of(last)
            assert unfinished is not None, "counted by it"
            return unfinished
        alias = read_alias(self._store, self._name, ACCEPTED)
        return RoundStart(
            number=last + 1,
            accepted=None if alias is None else alias.manifest,
            alias_sequence=0 if alias is None else alias.sequence,
            previous_prompts=end.prompts if last and end is not None else None,
            started_at=datetime.now(UTC),
            run_id=run_id,
        )

    def start(self, start: RoundStart) -> None:
        """Store the start before the round's first job. A round started before may get other prompts and nodes now.

        Raises ConflictError if another process has started the round.
        """
        path = self._path(start.number, "start")
        stored = self._store.get_tagged(path)
        if stored is None:
            self._write_once(path, start)
        elif (before := _document(path, stored[0], RoundStart)) != start:
            if before.model_copy(update={"prompts": start.prompts, "nodes": start.nodes}) != start:
                raise ConflictError(f"{path}: this round was started by another process ({before.run_id})")
            self._store.replace(path, _encoded(start), stored[1])

    def attempts(self, start: RoundStart) -> list[Attempt]:
        """Return the attempts at the nodes of a round since its start, of other runs too."""
        of_nodes = (each for ref in start.nodes for each in Attempts(self._store, ref).all())
        return [attempt for attempt in of_nodes if attempt.started_at >= start.started_at]

    def accept(self, start: RoundStart, candidate: ArtifactRef, reason: str, record: ArtifactRef | None = None) -> str:
        """Move the alias `accepted` to the candidate. Returns the reason if another process has moved it meanwhile.

        record: the round's artifact, the evidence of the move.
        A second call for the same round is a no-op.
        """
        by = f"round {start.number}"
        alias = read_alias(self._store, self._name, ACCEPTED)
        if alias is not None and (alias.by, alias.manifest) == (by, candidate):
            return ""
        try:
            move_alias(
                self._store, self._name, ACCEPTED, candidate,
                by=by, reason=reason, seen=start.alias_sequence, evidence=Evidence(gate=record),
            )  # fmt: skip
        except ConflictError as error:
            return str(error)
        return ""

    def end(self, end: RoundEnd) -> None:
        """Store the end of a round. Raises ConflictError if the round has ended already."""
        self._write_once(self._path(end.number, "end"), end)

    def skip(self, reason: str) -> RoundEnd:
        """End the unfinished round without a verdict; the next one has other prompts.

        Raises ConflictError if there is none, or a process runs it.
        """
        taken = self.take()
        if isinstance(taken, Holder):
            raise ConflictError(f"a round of {self._name} is running, in process {taken.pid} on {taken.host}")
        with taken:
            start = self.current()
            if self.start_of(start.number) is None:
                raise ConflictError(f"no round of {self._name} has been started and has not ended")
            return self.give_up(start, reason, run_id="")

    def give_up(self, start: RoundStart, reason: str, run_id: str) -> RoundEnd:
        """End the round as `skip` does, called by the process that runs it."""
        used = start.prompts is not None and ArtifactRepository(self._store).manifest(start.prompts) is not None
        skipped = RoundEnd(
            number=start.number, verdict="skipped", reason=reason, record=None, candidate=None,
            prompts=start.prompts if used else start.previous_prompts, ended_at=datetime.now(UTC), run_id=run_id,
            attempts=tuple(self.attempts(start)),
        )  # fmt: skip
        self.end(skipped)
        return skipped

    @property
    def _lease_path(self) -> str:
        return f"leases/loops/{self._name}.json"

    @property
    def page_path(self) -> str:
        """Path of the page with all rounds."""
        return f"loops/{self._name}/rounds.html"

    def pins_path(self, number: int) -> str:
        """Return the path of the round's pins: its aliases, branches and files as of its start."""
        return self._path(number, "pins")

    def _numbers(self) -> list[int]:
        """Return the numbers of the rounds that were started, in order. Objects with other names are ignored."""
        paths = (path.split("/") for path in self._store.list(f"loops/{self._name}/"))
        numbers = {parts[2] for parts in paths if len(parts) == 4 and parts[3] in ("start.json", "end.json")}
        return sorted(int(text) for text in numbers if _NUMBER.fullmatch(text))

    def _path(self, number: int, document: str) -> str:
        return f"loops/{self._name}/{number:06}/{document}.json"

    def _read(self, path: str, kind: type[Document]) -> Document | None:
        data = self._store.get(path)
        return None if data is None else _document(path, data, kind)

    def _write_once(self, path: str, document: Config) -> None:
        try:
            self._store.put_if_absent(path, _encoded(document))
        except ConflictError:
            if self._read(path, type(document)) != document:  # else it is our own write, whose response was lost
                raise


def _encoded(document: Config) -> bytes:
    return document.model_dump_json(indent=1).encode()


def _document(path: str, data: bytes, kind: type[Document]) -> Document:
    what = "the start of a round" if kind is RoundStart else "the end of a round"
    return parsed(kind, data, path, what, "copy it back from a backup, or delete it in the store")
