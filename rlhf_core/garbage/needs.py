"""Needed artifacts with the reasons: aliases, loops, runs, jobs, and artifacts made from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import TypeVar

from pydantic import AwareDatetime, BaseModel

from rlhf_core.artifacts.leases import LeaseRecord
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.garbage.contents import Blobs, Documents, Folder, parsed_leniently, read_folders
from rlhf_core.garbage.keep import CHECKPOINTS, RUNS, Keep, described, kind_of, time_to_live

Root = TypeVar("Root", bound=BaseModel)
_STARTED_LATELY = timedelta(days=1)  # a run that may be between two jobs
_LEASE = re.compile(r"leases/([^/]+)/([0-9a-f]{64})\.json")
_ROUND = re.compile(r"loops/([^/]+)/([0-9]+)/(?:start|end)\.json")
_RUN = re.compile(r"runs/([^/]+)/(?:run|needs)\.json")
_ALIAS = re.compile(r"aliases/([^/]+/[^/]+)\.json")
_MOVE = re.compile(r"registry/[^/]+/moves/[^/]+/[0-9]+\.json")
_DECISION = re.compile(r"registry/[^/]+/decisions/[0-9a-f]{64}\.json")


class _Evidence(BaseModel):
    gate: ArtifactRef | None = None


class _Alias(BaseModel):
    """The newest or an earlier move of an alias."""

    manifest: ArtifactRef
    previous: ArtifactRef | None = None
    evidence: _Evidence = _Evidence()


class _Decision(BaseModel):
    gate: ArtifactRef
    candidate: ArtifactRef


class _Round(BaseModel):
    accepted: ArtifactRef | None = None
    previous_prompts: ArtifactRef | None = None
    prompts: ArtifactRef | None = None
    record: ArtifactRef | None = None
    candidate: ArtifactRef | None = None


class _Node(BaseModel):
    ref: ArtifactRef


class _Run(BaseModel):
    nodes: list[_Node]
    finished_at: AwareDatetime | None = None  # none: it has only begun


@dataclass(frozen=True, slots=True)
class Reason:
    group: str  # such as `alias`
    detail: str  # such as `alias support-bot/champion`


@dataclass(frozen=True)
class Needs:
    folders: Mapping[ArtifactRef, Folder]
    reasons: Mapping[ArtifactRef, Reason]  # of what is needed or young, with and without a folder
    active: Collection[ArtifactRef]  # of jobs and runs at work: also their unfinished stages are needed

    @cached_property
    def blobs(self) -> Blobs:
        """Blobs that a document of any folder names."""
        return Blobs().union(*(folder.blobs for folder in self.folders.values()))


class NeedsReader:
    """Reads the needs of a store; again, it reads only the documents that have changed."""

    def __init__(self, store: Store, keep: Keep, live_runs: Callable[[], Collection[str]]):
        """live_runs: returns the ids of runs that follow a job now."""
        self._store = store
        self._keep = keep
        self._live_runs = live_runs
        self._documents = Documents(store)

    def read(self) -> Needs:
        """Raises IntegrityError for a document that cannot be read, StoreError."""
        # Roots before folders: a job that ends meanwhile is seen either at work or by its manifest.
        live_runs = self._live_runs()
        leases = self._root("leases/", _LEASE, LeaseRecord)
        runs = self._root("runs/", _RUN, _Run)
        aliases = self._root("aliases/", _ALIAS, _Alias)
        # Moves after aliases: a move is copied there before it is replaced.
        moves = self._root("registry/", _MOVE, _Alias)
        decisions = self._root("registry/", _DECISION, _Decision)
        rounds = self._root("loops/", _ROUND, _Round)
        folders = read_folders(self._store, self._documents)

        now = datetime.now(UTC)
        active = {_ref(path) for (path, _), lease in leases.items() if not lease.is_free(now)}
        reasons = dict.fromkeys(active, Reason("job", "a job computes it now"))
        for (path, _), alias in aliases.items():
            name = path.removeprefix("aliases/").removesuffix(".json")
            reasons.setdefault(alias.manifest, Reason("alias", f"alias {name}"))
            if alias.previous is not None:
                reasons.setdefault(alias.previous, Reason("alias", f"alias {name}, before its last move"))
            if alias.evidence.gate is not None:
                reasons.setdefault(alias.evidence.gate, Reason("alias", f"evidence of the alias {name}"))
        for (path, _), move in moves.items():
            _, model, _, name, number = path.removesuffix(".json").split("/")
            for ref in (move.manifest, move.previous, move.evidence.gate):
                if ref is not None:
                    reasons.setdefault(ref, Reason("alias", f"move {int(number)} of the alias {model}/{name}"))
        for (path, _), decision in decisions.items():
            for ref in (decision.gate, decision.candidate):
                reasons.setdefault(ref, Reason("alias", f"a decision on a candidate of {path.split('/')[1]}"))
        for (path, _), one in rounds.items():
            loop, number = path.split("/")[1:3]
            for ref in (one.accepted, one.previous_prompts, one.prompts, one.record, one.candidate):
                if ref is not None:
                    reasons.setdefault(ref, Reason("loop", f"round {int(number)} of the loop {loop}"))
        live = {spec.run_id for ref in active if ref in folders and (spec := folders[ref].spec)} | {*live_runs}
        for (path, modified), run in runs.items():
            run_id = path.split("/")[1]
            at_work = run.finished_at is None and (run_id in live or now - modified < _STARTED_LATELY)
            if at_work or is_young(run.finished_at or modified, self._keep[RUNS], now):
                for node in run.nodes:
                    reasons.setdefault(node.ref, Reason("run", f"run {run_id}"))
            if at_work:
                active |= {node.ref for node in run.nodes}
        for ref, folder in folders.items():
            if (reason := self._by_age(folder, now)) is not None:
                reasons.setdefault(ref, reason)
        _add_inputs(folders, reasons)
        return Needs(folders, reasons, active)

    def _root(self, prefix: str, name: re.Pattern[str], kind: type[Root]) -> dict[tuple[str, datetime], Root]:
        """Return the documents below `prefix` with such a name, by path and time of their last write."""
        modified = {e.path: e for e in self._store.entries(prefix) if name.fullmatch(e.path)}
        read = self._documents.read(modified.values(), partial(parsed_leniently, kind))
        return {(path, modified[path].modified): document for path, document in read.items()}

    def _by_age(self, folder: Folder, now: datetime) -> Reason | None:
        """Return why a folder is kept that nothing needs; None: it may go."""
        if folder.manifest is not None and folder.manifest.made is not None:
            kind, since = kind_of(folder.ref.stage, folder.manifest.kind), folder.manifest.made
        else:
            kind, since = CHECKPOINTS, folder.newest
        time = time_to_live(self._keep, kind)
        return Reason("--keep", f"--keep {kind}={described(time)}") if is_young(since, time, now) else None


def is_young(since: datetime, time: timedelta | None, now: datetime) -> bool:
    return time is None or now - since < time


def _ref(lease: str) -> ArtifactRef:
    _, stage, name = lease.split("/")
    return ArtifactRef(stage=stage, key=name.removesuffix(".json"))


def _add_inputs(folders: Mapping[ArtifactRef, Folder], reasons: dict[ArtifactRef, Reason]) -> None:
    """Add all that the needed artifacts were made from, or are being made from."""
    waiting = list(reasons)
    while waiting:
        ref = waiting.pop()
        for parent in folders[ref].inputs if ref in folders else ():
            if parent not in reasons:
                reasons[parent] = Reason("lineage", f"{ref} was made from it")
                waiting.append(parent)
