"""Jobs that are stopped, or whose node is drained, write a checkpoint; the next one ends to the bit where one would."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.contract import Input
from rlhf_core.tracking.protocol import Progress
from tasks.followers import Follower
from tasks.job_end import JobCancelledError
from tasks.job_request import JobRequest
from tasks.ray_jobs import RayJobs, _Client, connect
from tasks.stage import _compute
from tests.cluster import Service, service_environment, start_ray
from tests.rlhf_core.stages.rl_jobs import results, specified
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER, base_model, conversations, dataset

pytestmark = pytest.mark.system

STEPS = 240
CONFIG = SFTConfig(
    dataset="d", batch_size=4, epochs=STEPS // 3, max_length=32, optimizer=OPTIMIZER, engine=ENGINE, log_every=1,
    placement=Placement(cpus_per_worker=2.0, threads=1),
)  # fmt: skip


class Watcher:
    """Calls `act` once, in a thread, when the job has done 20 steps of its first attempt."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.phases: list[str] = []
        self.cancel = threading.Event()
        self._act: Callable[[], None] | None = act

    def submitted(self, job_id: str, attached: bool) -> None: ...

    def progress(self, progress: Progress) -> None:
        if not self.phases or self.phases[-1] != progress.phase:
            self.phases.append(progress.phase)
        if progress.phase == "train" and 20 <= progress.step < STEPS and self._act is not None:
            act, self._act = self._act, None
            threading.Thread(target=act).start()

    def line(self, line: str) -> None:
        self.phases.append(line)

    def cancelled(self) -> bool:
        return self.cancel.is_set()


class Run:
    def __init__(self, folder: Path, inputs: dict[str, Input]) -> None:
        self.repository = ArtifactRepository(LocalStore(folder / "store"))
        self.spec: StageSpec = specified(self.repository, inputs, folder, CONFIG, "sft")
        self.checkpoints = Checkpoints(self.repository.store, self.spec.ref)

    def compute(self, jobs: RayJobs, watcher: Watcher) -> None:
        command = f"exec python -m rlhf_core.stages --store {self.repository.store.url} --stage sft --key {self.spec.key}"
        request = JobRequest(self.repository.store.url, "sft", self.spec.key, command, {}, {}, cpus=0.0)
        _compute(request, jobs, watcher, Follower(self.repository.store, request.id_prefix, "run"))

    def ended(self, cache: Path) -> object:
        return results(self.repository, self.repository.manifest(self.spec.ref), cache)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    folder = tmp_path_factory.mktemp("inputs")
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", conversations(12))}


def test_a_cancelled_job_writes_a_checkpoint_that_the_next_resumes_from(
    inputs: dict[str, Input], ray_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_address)
    jobs, run, whole = connect(), Run(tmp_path / "stopped", inputs), Run(tmp_path / "whole", inputs)
    watcher = Watcher(lambda: watcher.cancel.set())
    with pytest.raises(JobCancelledError):
        run.compute(jobs, watcher)
    step = run.checkpoints.newest_step()
    assert step is not None
    assert 20 <= step < STEPS  # none was due, for ten minutes
    again = Watcher(lambda: None)
    run.compute(jobs, again)
    assert f"resumes after step {step}" in again.phases
    whole.compute(jobs, Watcher(lambda: None))
    assert run.ended(tmp_path / "cache") == whole.ended(tmp_path / "cache")


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[tuple[RayJobs, str]]:
    """A head without CPUs, which jobs' own processes are on, and two nodes with two each."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    head, dashboard = start_ray(tmp_path / "ray.log", folder, cpus=0)
    address = next(part for part in head.command if part.startswith("--port=")).replace("--port=", "127.0.0.1:")
    join = [head.command[0], "start", "--block", f"--address={address}", "--num-cpus=2", "--node-ip-address=127.0.0.1",
            "--disable-usage-stats", f"--object-store-memory={80 * 1024**2}"]  # fmt: skip
    nodes = [Service(join, tmp_path / f"node{i}.log", head.environment) for i in range(2)]
    yield RayJobs(_Client(dashboard)), address
    for service in (*nodes, head):
        service.end()


DRAIN = """
import sys, ray
from ray.util.placement_group import placement_group_table
from rlhf_core.actors.draining import drain
ray.init(address=sys.argv[1], log_to_driver=False)
(group,) = [g for g in placement_group_table().values() if g["state"] == "CREATED"]
(node,) = group["bundles_to_node_id"].values()
drain(node, 60.0)
"""


@pytest.mark.endurance("two-nodes")
@pytest.mark.slow("a Ray cluster of three nodes")
def test_a_job_whose_node_is_drained_resumes_on_another(
    inputs: dict[str, Input], two_nodes: tuple[RayJobs, str], tmp_path: Path
) -> None:
    jobs, address = two_nodes
    run, whole = Run(tmp_path / "drained", inputs), Run(tmp_path / "whole", inputs)
    command = [sys.executable, "-c", DRAIN, address]
    watcher = Watcher(lambda: subprocess.run(command, env=service_environment(), check=True))  # type: ignore[arg-type, return-value]
    run.compute(jobs, watcher)
    whole.compute(jobs, Watcher(lambda: None))
    (resubmitted,) = [line for line in watcher.phases if line.endswith("submitting it again")]
    assert resubmitted.startswith("PreemptedError: a node of the job is taken away; it resumes after step ")
    step = resubmitted.split("after step ")[1].split(",")[0]
    assert f"resumes after step {step}" in watcher.phases
    assert run.ended(tmp_path / "cache") == whole.ended(tmp_path / "cache")
