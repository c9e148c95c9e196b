"""RL on two Ray nodes that share no file system: a rank and an engine on each; a rank is killed, the job resumed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from ray.job_submission import JobSubmissionClient

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.contract import Input
from rlhf_core.warm.client import SOCKET_VARIABLE
from tasks.job_end import JobEndedError
from tasks.job_log import Progress
from tasks.job_request import JobRequest
from tasks.ray_jobs import RayJobs
from tests.cluster import ROOT, service_environment
from tests.rlhf_core.stages.rl_jobs import job_inputs, results, specified, two_by_two
from tests.services import store_of_runs
from tests.two_nodes.machines import PRIVATE, Machine, connect

HEAD, OTHER = "10.77.0.1", "10.77.0.2"
DASHBOARD = f"http://{HEAD}:8265"
# A node has room for one rank and one engine. Ray starts with the node that has more left over: rank 0 goes to the
# other node, while the job's driver runs on the head.
CPUS = {HEAD: 8, OTHER: 9}
WARM_SOCKET = "/tmp/warm.sock"  # on each machine, which has a /tmp of its own
SECONDS = 600.0


def config() -> RLConfig:
    both = two_by_two(zero_stage=2)
    placement = both.placement.model_copy(update={"cpus_per_worker": 6.0})
    return both.model_copy(
        update={
            "placement": placement,
            "rollout": both.rollout.model_copy(update={"cpus_per_engine": 2.0, "transport": "collective"}),
        }
    )


class Nodes:
    """A Ray head and a second node, each on a machine of its own; the head's is that of the S3 server too."""

    def __init__(self, folder: Path) -> None:
        self.head = Machine("head", folder / "head.log", own_network=False)
        self.other = Machine("other", folder / "other.log", own_network=True)

    def start(self) -> None:
        # Nothing that the user's shell says of other clusters and stores.
        kept = {n: v for n, v in service_environment().items() if not n.startswith(("RAY_", "ALIGNMENT_", "AWS_"))}
        environment = {
            **kept, "RAY_AUTH_MODE": "disabled", "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1", "RAY_worker_niceness": "0",
            SOCKET_VARIABLE: WARM_SOCKET,
        }  # fmt: skip
        self.head.start(_node(HEAD, "--head", "--port=6379", f"--dashboard-host={HEAD}"), environment)
        self.other.start(_node(OTHER, f"--address={HEAD}:6379"), environment)
        connect(self.head, HEAD, self.other, OTHER)
        self.require_isolated()
        self.head.run()
        self._wait_for(1)
        self.other.run()
        self._wait_for(2)
        self._wait_until_warm()

    def require_isolated(self) -> None:
        """What one machine writes the other does not see, and neither can write where both read."""
        for machine, another in ((self.head, self.other), (self.other, self.head)):
            for folder in PRIVATE:
                assert machine.inside("touch", f"{folder}/of-{machine.name}").returncode == 0
                assert another.inside("test", "-e", f"{folder}/of-{machine.name}").returncode == 1
            for folder in ("/", str(ROOT), sys.prefix, os.environ["HOME"]):
                assert machine.inside("touch", f"{folder}/of-{machine.name}").returncode == 1

    def _wait_for(self, count: int) -> None:
        deadline = time.monotonic() + SECONDS
        while (alive := _alive_nodes()) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{alive} of {count} nodes:\n{self.head.output()}\n{self.other.output()}")
            time.sleep(0.5)

    def _wait_until_warm(self) -> None:
        deadline = time.monotonic() + SECONDS
        for machine in (self.head, self.other):
            while machine.inside("test", "-S", WARM_SOCKET).returncode:
                assert time.monotonic() < deadline, machine.output()
                time.sleep(0.5)

    def stop(self) -> None:
        self.other.stop()
        self.head.stop()


def _node(address: str, *arguments: str) -> list[str]:
    """Ray, and beside it the process that jobs, ranks and engines are forks of."""
    warm = f'{sys.executable} -m rlhf_core.warm.server {WARM_SOCKET} & exec "$@"'
    return [
        "sh", "-c", warm, "sh", str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats",
        f"--node-ip-address={address}", f"--num-cpus={CPUS[address]}", f"--object-store-memory={128 * 1024**2}",
        *arguments,
    ]  # fmt: skip


def _alive_nodes() -> int:
    try:
        answer = httpx.get(f"{DASHBOARD}/nodes?view=summary", timeout=5).raise_for_status().json()
        nodes = answer["data"]["summary"]
        ready = httpx.get(f"{DASHBOARD}/api/jobs/", timeout=5).is_success
    except httpx.HTTPError:
        return 0
    return sum(node["raylet"].get("state") == "ALIVE" for node in nodes) if ready else 0


class Log:
    """What a job prints. Implements tasks.ray_jobs.JobWatcher."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.phases: list[str] = []

    def progress(self, progress: Progress) -> None:
        if not self.phases or self.phases[-1] != progress.phase:
            self.phases.append(progress.phase)
            print(f"  {time.strftime('%X')} {progress}", flush=True)

    def line(self, line: str) -> None:
        self.lines.append(line)

    def cancelled(self) -> bool:
        return False


class Run:
    """The RL stage in a store of its own, as jobs."""

    def __init__(self, jobs: RayJobs, store_url: str, inputs: Mapping[str, Input], recipe: Path) -> None:
        self._jobs = jobs
        self.repository = ArtifactRepository(open_store(store_url))
        self.spec: StageSpec = specified(self.repository, inputs, recipe, config())
        self.checkpoints = Checkpoints(self.repository.store, self.spec.ref)

    def submit(self) -> str:
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        url = self.repository.store.url
        command = f"exec python -m rlhf_core.stages --store {url} --stage rl --key {self.spec.key}"
        request = JobRequest(url, "rl", self.spec.key, command, environment, {}, cpus=0.0)
        job, attached = self._jobs.submit_or_attach(request)
        assert not attached
        return job

    def follow(self, job: str) -> Log:
        log = Log()
        try:
            self._jobs.follow(job, log)
        except JobEndedError:
            print(*log.lines[-30:], sep="\n    ", flush=True)
            raise
        return log

    @property
    def manifest(self) -> Manifest | None:
        return self.repository.manifest(self.spec.ref)


def disturbed(run: Run, nodes: Nodes) -> dict[str, Any]:
    """The run, one rank of which dies after a checkpoint; then its job is submitted again."""
    job = run.submit()
    deadline = time.monotonic() + SECONDS
    while run.checkpoints.newest_step() is None:
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.5)
    placed = {machine.name: len(machine.processes("EngineActor")) for machine in (nodes.head, nodes.other)}
    (rank,) = nodes.other.processes("_Rank")
    rank.kill()
    try:
        run.follow(job)
    except JobEndedError as error:
        reason = str(error)
    else:
        raise AssertionError("the job succeeded although one of its ranks was killed")
    step, manifest = run.checkpoints.newest_step(), run.manifest
    assert manifest is None
    log = run.follow(run.submit())
    return {"engines": placed, "reason": reason, "checkpoint": step, "phases": log.phases, "lines": log.lines}


def play(folder: Path) -> dict[str, Any]:
    """Two runs, one of them disturbed, and all that a test compares."""
    began = time.monotonic()
    with ExitStack() as stack:
        print("two machines, each with a Ray node", flush=True)
        nodes = Nodes(folder)
        stack.callback(nodes.stop)
        nodes.start()
        stack.enter_context(store_of_runs(HEAD))
        jobs = RayJobs(JobSubmissionClient(DASHBOARD))
        inputs, recipe = job_inputs(folder / "inputs"), folder / "recipe"
        whole, killed = (Run(jobs, f"s3://runs/{name}", inputs, recipe) for name in ("whole", "killed"))
        print("a run that nothing disturbs", flush=True)
        whole.follow(whole.submit())
        print("a run whose rank is killed after a checkpoint", flush=True)
        found = disturbed(killed, nodes)
        runs = [results(run.repository, run.manifest, folder / "cache") for run in (whole, killed)]
        return {
            **found,
            "weights": [weights for weights, _ in runs],
            "metrics": [metrics for _, metrics in runs],
            "checkpoints_left": killed.checkpoints.newest_step(),
            "seconds": time.monotonic() - began,
        }


if __name__ == "__main__":
    (Path("/tmp") / "rack").mkdir()
    with os.fdopen(int(sys.argv[1]), "w") as answer:
        json.dump(play(Path("/tmp/rack")), answer)
