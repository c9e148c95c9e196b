"""A run of `tiny` on the local stack, whose parts are killed one after the other.

`alignment up` starts the stack in a folder of its own. The ranks of a stage that trains are frozen while a part is
killed, so that the stage cannot end before; afterwards the run must continue by itself, or after a Retry.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from prefect.states import AwaitingRetry
from ray.job_submission import JobSubmissionClient

from deployments.stack import control
from deployments.stack.automations import automations, create
from deployments.stack.environment import merged_environment, recorded_environment
from deployments.stack.processes import processes_of
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.leases import holder_at
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.system.scratch import PREFIX, sweep
from tasks.followers import FollowersRecord
from tasks.ray_jobs import RayJobs
from tests.chaos.recipe import WHOLE, write_recipes

ROOT = Path(__file__).resolve().parents[2]
# A part of the command or title of each process that works on a run.
FLOW, DRIVER, SUPERVISOR = "flows.process", "rlhf_core.stages --store", ":JobSupervisor"
RANK, ENGINE = "ray::_Rank", "ray::EngineActor"
SECONDS = 1800.0 if WHOLE else 600.0
# Of the automation, in place of 80: the least that is longer than the time between two heartbeats, 30 s.
SILENCE = timedelta(seconds=40)
_PULSE_SECONDS = 0.1
_LOOK_SECONDS = 0.5  # a look costs processor time, which what is waited for needs


def until(
    condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = SECONDS, every: float = _LOOK_SECONDS
) -> Any:
    """what: in words; called when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain for {what if isinstance(what, str) else what()}")
        time.sleep(every)


@dataclass(frozen=True)
class Place:
    folder: Path  # of the test: the recipe and the stack's state
    environment: Mapping[str, str]  # of a command that uses the stack

    @property
    def stack(self) -> Path:
        return self.folder / "stack"

    @property
    def recipe(self) -> str:
        return str(self.folder / "recipe" / "chaos.yaml")


@contextmanager
def started_stack(folder: Path, patch: Any) -> Any:
    """The local stack; afterwards nothing of it is left."""
    write_recipes(folder / "recipe")
    for name in [n for n in os.environ if n.startswith(("ALIGNMENT_", "AWS_", "RAY_", "PREFECT_"))]:
        patch.delenv(name)
    folders = {"ALIGNMENT_STACK_DIR": "stack", "ALIGNMENT_CACHE": "cache", "ALIGNMENT_WORKDIR": "work"}
    for name, part in folders.items():
        (folder / part).mkdir()
        patch.setenv(name, str(folder / part))
    patch.setenv("RAY_worker_niceness", "0")
    patch.setenv("ALIGNMENT_RAY_CPUS", "4")  # so that a run fits beside the ranks of another that are held
    try:
        control.up(report=lambda line: None)
        environment = merged_environment(os.environ, recorded_environment(folder / "stack"))
        for name, value in environment.items():
            patch.setenv(name, value)
        settings = {PREFECT_API_URL: environment["PREFECT_API_URL"], PREFECT_HOME: environment["PREFECT_HOME"]}
        with temporary_settings(settings):
            yield Place(folder, environment)
    finally:
        control.down(report=lambda line: None)


class Run:
    """A run of the recipe as the deployment `alignment/full`, which is under way."""

    def __init__(self, place: Place, client: SyncPrefectClient) -> None:
        self.place = place
        self.store = place.environment["ALIGNMENT_STORE"]
        self._opened = open_store(self.store)
        self._client = client
        self._graph = prepare(place.recipe, []).graph
        self._held: list[psutil.Process] = []
        create(client, automations(silence=SILENCE))
        parameters = {"recipe": place.recipe, "overrides": []}
        flow_run: Any = run_deployment("alignment/full", parameters=parameters, timeout=0, as_subflow=False)
        self.id: UUID = flow_run.id

    def state(self) -> State:
        state = self._client.read_flow_run(self.id).state
        assert state is not None
        return state

    def wait_for_its_end(self) -> State:
        found: State = until(lambda: state if (state := self.state()).is_final() else None, "the end of the run")
        return found

    def retry(self) -> None:
        """What the Retry button of the UI sends; returns when the next attempt has a process."""
        self._client.set_flow_run_state(self.id, AwaitingRetry(message="Retry from the UI"), force=True)
        until(lambda: self.state().name == "Running" and self.flow_processes(), "the next attempt")

    def restore_automations(self) -> None:
        """As `up` made them: a server that restarts needs more patience."""
        create(self._client, automations())

    def flow_processes(self) -> list[psutil.Process]:
        mine = str(self.id)
        return [p for p in processes(self.place, FLOW) if _variable(p, "PREFECT__FLOW_RUN_ID") == mine]

    def hold(self, node: str, steps: int) -> int:
        """Freezes the ranks of `node` once it has `steps` more in a checkpoint; the step of the newest checkpoint."""
        wanted = self.checkpoint(node) + steps
        until(lambda: self._reached(node), f"the first checkpoint of {node}")  # nothing is held while it starts

        def reached() -> bool:
            """Lets the ranks run for a moment, so that however fast they are they do not get far."""
            ranks = [rank for rank in self._held if rank.is_running()] or processes(self.place, RANK)
            self.let_go()
            time.sleep(_PULSE_SECONDS)
            self._held = ranks
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.suspend()
            return self._reached(node) >= wanted

        until(reached, lambda: f"a checkpoint of {node} (the run is {self.state()})")
        return self.checkpoint(node)

    def let_go(self) -> None:
        for rank in self._held:
            with suppress(psutil.NoSuchProcess):
                rank.resume()
        self._held = []

    def inputs(self, node: str) -> set[str]:
        """The nodes that it reads."""
        return set(self._graph[node].inputs.values())

    def _reached(self, node: str) -> int:
        """As `checkpoint`, while the run is under way."""
        state = self.state()
        assert not state.is_final(), f"the run has ended before {node}: {state}"
        return self.checkpoint(node)

    def checkpoint(self, node: str) -> int:
        """The step of the newest; 0 if there is none."""
        return Checkpoints(self._opened, self._graph[node].ref).newest_step() or 0

    def resumed_after(self, node: str) -> int:
        """The step after which the newest job of the node resumed, once it has said so."""
        stage, key = self._graph[node].stage.name, self._graph[node].ref.key
        cluster = jobs()

        def said() -> re.Match[str] | None:
            found = [job_id for job_id in cluster.running() if job_id.startswith(f"{stage}-{key[:16]}-")]
            return re.search(r"resumes after step (\d+)", cluster._client.get_job_logs(found[0])) if found else None

        return int(until(said, "a job that resumes")[1])


def jobs() -> RayJobs:
    # The token as a header: the mode in this process's own environment may be another test's matter.
    headers = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
    return RayJobs(JobSubmissionClient(os.environ["RAY_API_SERVER_ADDRESS"], headers=headers))


def service(name: str) -> psutil.Process:
    pid = next(line.pid for line in control.status() if line.name == name)
    assert pid, name
    return psutil.Process(pid)


def await_service(name: str, killed: psutil.Process) -> None:
    def back() -> bool:
        line = next(line for line in control.status() if line.name == name)
        return line.state == "working" and line.pid not in (0, killed.pid)

    until(back, f"the service {name}")


def kill(processes: list[psutil.Process]) -> None:
    assert processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def processes(place: Place, part: str) -> list[psutil.Process]:
    """Those of the stack with `part` in their command or title."""
    found = []
    for process in processes_of(place.stack):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if part in " ".join(process.cmdline()):
                found.append(process)
    return found


def _variable(process: psutil.Process, name: str) -> str:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return str(process.environ().get(name, ""))
    return ""


@contextmanager
def undisturbed(place: Place) -> Iterator[str]:
    """Yields the URL of another store on the same services, for which a run without a worker computes the recipe
    meanwhile; it has ended when the block is left."""
    store = f"{place.environment['ALIGNMENT_STORE']}/undisturbed"
    code = f"from flows.alignment import alignment; alignment({place.recipe!r})"
    environment = {**place.environment, "ALIGNMENT_STORE": store, "PYTHONPATH": str(ROOT)}
    with (place.folder / "undisturbed.log").open("wb") as log:
        flow = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield store
        assert flow.wait(SECONDS) == 0, (place.folder / "undisturbed.log").read_text()[-3000:]
    finally:
        flow.kill()
        flow.wait()


def manifests(store: str, place: Place) -> dict[str, Manifest]:
    """Of each node that the store has."""
    repository = ArtifactRepository(open_store(store))
    found = {name: repository.manifest(node.ref) for name, node in prepare(place.recipe, []).graph.items()}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def weights(found: Mapping[str, Manifest]) -> dict[str, str]:
    """The hash of each file of weights."""
    return {
        f"{name}/{file.path}": file.sha256
        for name, manifest in found.items()
        for file in manifest.files
        if file.path.endswith(".safetensors")
    }


def leftovers(place: Place) -> list[str]:
    """Leases that are held, runs that follow a job, folders of jobs and engines that the next job would not remove."""
    store = open_store(place.environment["ALIGNMENT_STORE"])
    work, temporary = place.folder / "work", place.stack / "tmp"
    for root in (work, temporary):
        sweep(root)  # what the next job begins with, or `down`
    left = (work.rglob("*"), temporary.glob(f"{PREFIX}*"), temporary.glob("vllm*"))
    found = [str(path) for paths in left for path in paths]
    found += [path for path in store.list("leases/") if holder_at(store, path)]  # a dead process holds none
    for path in store.list("followers/"):
        followers = FollowersRecord.model_validate_json(store.get(path) or b"").expires_at
        if any(until > datetime.now(UTC) for until in followers.values()):  # a killed run's place ends by itself
            found.append(path)
    return found


def processes_left(place: Place) -> set[psutil.Process]:
    session = place.stack / "supervisord.pid"
    return processes_of(place.stack, sessions=[int(session.read_text())] if session.is_file() else [])
