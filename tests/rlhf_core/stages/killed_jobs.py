"""An RL job with real ranks and engines that is killed or stopped in the middle of a step and submitted again, beside
one that nothing disturbs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.contract import Input
from rlhf_core.stages import job
from rlhf_core.stages.runner import run_job
from tests.rlhf_core.stages.killed_runs import SECONDS, finish, kill_when_held, start
from tests.rlhf_core.stages.rl_jobs import results, rows_of, specified

Result = tuple[str, list[dict[str, Any]]]  # the hash of the weights, and the lines of metrics


@dataclass(frozen=True)
class Compared:
    whole: Result
    killed: Result
    held_after: int  # the step before the one in which it was killed or stopped
    resumed_after: int  # the step of the checkpoint
    log: str  # of the killed job, both attempts


def killed_and_whole(
    config: RLConfig, inputs: Mapping[str, Input], folder: Path, ray_address: str, *, stops: bool = False
) -> Compared:
    """Three jobs on the cluster at `ray_address`, two of them at the same time. stops: as Ray does, and no kill."""
    environment = {"RAY_ADDRESS": ray_address, "ALIGNMENT_CACHE": str(folder / "cache")}
    whole, killed = (ArtifactRepository(open_store(str(folder / name / "store"))) for name in ("whole", "killed"))
    spec = specified(whole, inputs, folder / "whole", config)
    assert specified(killed, inputs, folder / "killed", config) == spec
    undisturbed = start(_job, whole.store.url, spec, folder / "whole", environment)
    holds = {"HOLD": str(folder / "killed"), "ALIGNMENT_STOP_SECONDS": "120"}
    first = start(_stopped_job if stops else _job, killed.store.url, spec, folder / "killed", environment | holds)
    checkpoints = Checkpoints(killed.store, spec.ref)
    while (checkpoints.newest_step() or 0) < 2:
        assert first.is_alive(), (folder / "killed" / "log").read_text()
        time.sleep(0.05)
    (folder / "killed" / "now").touch()
    if stops:
        held = _stop_when_held(first, folder / "killed", checkpoints)
    else:
        kill_when_held(first, folder / "killed")
        held = checkpoints.newest_step()
    step = checkpoints.newest_step()
    assert held is not None
    assert step is not None
    finish(start(_job, killed.store.url, spec, folder / "killed", environment))
    finish(undisturbed)
    assert checkpoints.newest_step() is None  # they go when the artifact is there
    ended = [results(run, run.manifest(spec.ref), folder / "cache") for run in (whole, killed)]
    return Compared(*ended, held, step, (folder / "killed" / "log").read_text())


def engine_killed_and_whole(
    config: StageConfig, inputs: Mapping[str, Input], folder: Path, ray_address: str, stage: str = "rl"
) -> tuple[Any, Any, str]:
    """Two jobs, an engine of one of which is killed while rewards are computed; results, and the log of that one."""
    environment = {"RAY_ADDRESS": ray_address, "ALIGNMENT_CACHE": str(folder / "cache")}
    whole, killed = (ArtifactRepository(open_store(str(folder / name / "store"))) for name in ("whole", "killed"))
    spec = specified(whole, inputs, folder / "whole", config, stage)
    assert specified(killed, inputs, folder / "killed", config, stage) == spec
    finish(start(_job, whole.store.url, spec, folder / "whole", environment))
    (folder / "killed" / "now").touch()
    job = start(_job, killed.store.url, spec, folder / "killed", environment | {"HOLD": str(folder / "killed")})
    _wait_until_held(job, folder / "killed")
    # Of this session's cluster.
    engines = [each for each in psutil.Process().children(recursive=True) if "EngineActor" in "".join(each.cmdline())]
    assert engines
    engines[0].kill()
    (folder / "killed" / "now").unlink()
    finish(job)
    read = results if stage == "rl" else rows_of
    ended = [read(run, run.manifest(spec.ref), folder / "cache") for run in (whole, killed)]
    return ended[0], ended[1], (folder / "killed" / "log").read_text()


def _wait_until_held(process: BaseProcess, folder: Path) -> None:
    while not (folder / "held").exists():
        assert process.is_alive(), (folder / "log").read_text()
        time.sleep(0.01)


def _stop_when_held(process: BaseProcess, folder: Path, checkpoints: Checkpoints) -> int | None:
    """Signal the job and its children when it holds; it may end its step. Return the step of the newest checkpoint."""
    _wait_until_held(process, folder)
    step, signalled = checkpoints.newest_step(), psutil.Process(process.pid)
    children = signalled.children(recursive=True)
    for each in (signalled, *children):
        each.send_signal(signal.SIGINT)
    (folder / "now").unlink()
    process.join(SECONDS)
    assert process.exitcode == 143, (folder / "log").read_text()
    assert children
    assert not psutil.wait_procs(children, timeout=20)[1]
    return step


def _stopped_job(store_url: str, spec: StageSpec, folder: Path, environment: dict[str, str]) -> None:
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
    os.environ.update(environment)
    sys.argv = ["job", "--store", store_url, "--stage", spec.ref.stage, "--key", spec.ref.key]
    sys.exit(job.main())


def _job(store_url: str, spec: StageSpec, folder: Path, environment: dict[str, str]) -> None:
    """The job of the spec, its output in a file, as on a cluster."""
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
    os.environ.update(environment)
    run_job(store_url, spec.ref)
