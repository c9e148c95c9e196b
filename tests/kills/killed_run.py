"""A run whose command is started again each time that a kill has ended it, until its results are in the store."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

import psutil

from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import Rounds
from rlhf_core.tracking.protocol import METRICS_FILE, TRACKING_FOLDER
from tests.chaos.scenario import (
    DRIVER,
    ENGINE,
    RANK,
    ROOT,
    SUPERVISOR,
    Place,
    await_service,
    kill,
    leftovers,
    processes,
    service,
    until,
)
from tests.kills.recipes import CHECKPOINT_STEPS

# Services of the stack that a run needs. No worker starts these runs.
SERVICES = ("prefect", "ray", "s3", "warm")
JOB_PARTS = {"driver": DRIVER, "supervisor": SUPERVISOR, "rank": RANK, "engine": ENGINE}
LONGEST_PAUSE = 30.0  # seconds between two kills
_PATIENCE = 900.0  # seconds for what is left of a run after its last kill
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Subject:
    """A recipe that is run once, or `rounds` rounds of a loop."""

    name: str
    recipe: str
    rounds: int = 0
    is_deterministic: bool = True

    @property
    def code(self) -> str:
        """Python code of a process of the run."""
        if self.rounds:
            return f"from flows.iterative_dpo import iterative_dpo; iterative_dpo({self.recipe!r})"
        return f"from flows.alignment import alignment; alignment({self.recipe!r})"

    def is_done(self, store: str) -> bool:
        """Return whether the rounds have ended; a recipe's run has when its command succeeds."""
        return not self.rounds or len(Rounds(open_store(store), "letters").ends()) >= self.rounds


@dataclass(frozen=True)
class Kill:
    """A kill, and how the command went on."""

    part: str
    after: float  # seconds since the command, or the last kill
    stages: tuple[str, ...]  # whose leases were held


@dataclass
class KilledRun:
    """A subject in a store of its own."""

    subject: Subject
    place: Place
    generator: random.Random
    kills: list[Kill] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    _finished: dict[str, datetime] = field(default_factory=dict)

    @property
    def store(self) -> str:
        return self.place.environment["ALIGNMENT_STORE"]

    def finish(self, budget: int) -> None:
        """Run to the end, with at most `budget` kills."""
        began = time.monotonic()
        command = self._started()
        try:
            while True:
                pause = self.generator.uniform(0, LONGEST_PAUSE) if len(self.kills) < budget else _PATIENCE
                code = _wait(command, pause)
                if code == 0 and self.subject.is_done(self.store):
                    break
                if code is not None:
                    command = self._started()
                elif len(self.kills) >= budget:
                    raise AssertionError(f"{self.subject.name} has not ended {_PATIENCE:.0f} s after its last kill")
                else:
                    self._kill(command, pause)
        finally:
            for process in _tree(command):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            command.wait()
        self.seconds = time.monotonic() - began
        self._require_nothing_twice()
        self._require_nothing_left()

    def digests(self) -> dict[str, str]:
        """Return the digest of each file of results; of none that holds times."""
        return {
            f"{manifest.ref.full}/{file.path}": file.sha256
            for manifest in ArtifactRepository(open_store(self.store)).list_artifacts()
            if manifest.kind not in (Kind.REPORT, Kind.STACKS)
            for file in manifest.files
            if file.path != METRICS_FILE and not file.path.startswith(f"{TRACKING_FOLDER}/")
        }

    def summary(self) -> dict[str, Any]:
        return {"subject": self.subject.name, "starts": self.starts, "seconds": round(self.seconds, 1),
                "kills": [asdict(kill) for kill in self.kills]}  # fmt: skip

    def _started(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        environment = {**self.place.environment, "PYTHONPATH": str(ROOT)}
        with (self.place.folder / f"{self.subject.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", self.subject.code], env=environment, cwd=ROOT, stdout=log, stderr=log
            )

    def _kill(self, command: subprocess.Popen[bytes], after: float) -> None:
        """Kill a part of the run, of those that there are; a service is back when this returns."""
        targets: dict[str, list[psutil.Process]] = {"command": _tree(command)}
        for part, title in JOB_PARTS.items():
            targets[part] = processes(self.place, title)
        drivers = {process.pid for process in targets["driver"]}
        named = {process for found in targets.values() for process in found}
        targets["helper"] = [  # fork servers, judges, sandboxes
            child for pid in drivers for child in _children(pid) if child not in named
        ]
        targets |= {f"frozen {part}": targets[part] for part in ("rank", "engine")}
        part = self.generator.choice([*(name for name, found in targets.items() if found), *SERVICES])
        self._note_finished()
        stages = tuple(path.split("/")[1] for path in open_store(self.store).list("leases/"))
        if part in SERVICES:
            process = service(part)
            kill([process])
            await_service(part, process)
        elif part == "command":
            kill(targets[part])
            command.wait()
        else:
            number = signal.SIGSTOP if part.startswith("frozen") else signal.SIGKILL
            with suppress(psutil.NoSuchProcess):
                self.generator.choice(targets[part]).send_signal(number)
        self.kills.append(Kill(part, after, stages))
        print(f"  {self.subject.name}: kill {len(self.kills)} after {after:.1f} s: {part}", flush=True)

    def _note_finished(self) -> None:
        """Keep when each artifact was finished that there is."""
        with suppress(OSError):
            for manifest in ArtifactRepository(open_store(self.store)).list_artifacts():
                self._finished.setdefault(manifest.ref.full, manifest.finished_at)

    def _require_nothing_twice(self) -> None:
        """Raise AssertionError if a finished artifact was computed again, or a kill cost more than a checkpoint."""
        store = open_store(self.store)
        repository = ArtifactRepository(store)
        manifests = {manifest.ref.full: manifest for manifest in repository.list_artifacts()}
        assert {name: manifests[name].finished_at for name in self._finished} == self._finished
        for manifest in manifests.values():
            attempts = Attempts(store, manifest.ref).all()
            assert [each.outcome for each in attempts].count("published") == 1, (manifest.ref, attempts)
            # Of attempts that were killed before they read a checkpoint, nothing is known.
            resumed = [each for each in attempts if each.resumed_after is not None or each.step]
            if every := CHECKPOINT_STEPS.get(manifest.ref.stage):
                for earlier, later in pairwise(resumed):
                    lost = (earlier.step or 0) - (later.resumed_after or 0)
                    assert lost <= every, (manifest.ref, lost, [(each.resumed_after, each.step) for each in resumed])

    def _require_nothing_left(self) -> None:
        until(lambda: not leftovers(self.place), lambda: f"the end of {leftovers(self.place)}", 120)


def of_store(place: Place, name: str) -> Place:
    """Return the place with a store of its own on the same services."""
    store: Mapping[str, str] = {"ALIGNMENT_STORE": f"{place.environment['ALIGNMENT_STORE']}/{name}"}
    return Place(place.folder, {**place.environment, **store})


def _wait(command: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code; None if the command is at work after `seconds`."""
    deadline = time.monotonic() + seconds
    while (code := command.poll()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return code


def _tree(command: subprocess.Popen[bytes]) -> list[psutil.Process]:
    if command.poll() is not None:
        return []
    return [psutil.Process(command.pid), *_children(command.pid)]


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    return []
