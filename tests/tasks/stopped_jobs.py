"""An SFT job of many short steps, no checkpoint of which is due, and its watcher, which acts in the middle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.artifacts.store import Store
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.config.watchdog import WatchdogConfig
from rlhf_core.contract import Input
from rlhf_core.stages.hang import STACKS_FILE
from rlhf_core.tracking.protocol import Progress
from tasks.followers import Follower
from tasks.job_request import JobRequest
from tasks.ray_jobs import RayJobs
from tasks.stage import _compute, _times_stuck
from tests.rlhf_core.stages.rl_jobs import results, specified
from tests.rlhf_core.stages.supervised_runs import ENGINE, OPTIMIZER, base_model, conversations, dataset

STEPS = 600  # 20 s and more: the hook of a drained node takes 8 s to start
CONFIG = SFTConfig(
    dataset="d", batch_size=4, epochs=STEPS // 3, max_length=32, optimizer=OPTIMIZER, engine=ENGINE, log_every=1,
    placement=Placement(cpus_per_worker=2.0, threads=1),
)  # fmt: skip


def sft_inputs(folder: Path) -> dict[str, Input]:
    return {"model": base_model(folder / "base"), "dataset": dataset(folder / "data", conversations(12))}


class Watcher:
    """Calls `act` in a thread when a job has done 20 steps, for the first `times` jobs."""

    def __init__(self, act: Callable[[], object] | None = None, times: int = 1) -> None:
        self.said: list[str] = []  # lines and phases
        self.stuck_for: list[str] = []
        self.cancel = threading.Event()
        self._act, self._times = act, times
        self._acts = False  # in this job

    def submitted(self, job_id: str, attached: bool) -> None:
        self._acts = self._times > 0
        self._times -= 1

    def stuck(self, reason: str) -> None:
        self.stuck_for.append(reason)

    def progress(self, progress: Progress) -> None:
        self.said.append(progress.phase)
        if progress.phase == "train" and 20 <= progress.step < STEPS and self._act is not None and self._acts:
            self._acts = False
            threading.Thread(target=self._act).start()

    def line(self, line: str) -> None:
        self.said.append(line)

    def cancelled(self) -> bool:
        return self.cancel.is_set()


class Run:
    """The stage in a store of its own, its recipe in `root`."""

    def __init__(
        self, store: Store, inputs: Mapping[str, Input], root: Path, watchdog: WatchdogConfig | None = None
    ) -> None:
        self._repository = ArtifactRepository(store)
        self._spec: StageSpec = specified(self._repository, inputs, root, CONFIG, "sft")
        if watchdog is not None:
            self._spec = self._spec.model_copy(update={"watchdog": watchdog.model_dump(mode="json")})
            self._repository.write_spec(self._spec)
        self._restarts = 0 if watchdog is None else watchdog.restarts
        self.checkpoints = Checkpoints(store, self._spec.ref)

    def compute(self, jobs: RayJobs, watcher: Watcher) -> None:
        store, key = self._repository.store, self._spec.key
        command = f"exec python -m rlhf_core.stages --store {store.url} --stage sft --key {key}"
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        request = JobRequest(store.url, "sft", key, command, environment, {}, cpus=0.0)
        follower = Follower(store, request.id_prefix, "run")
        _compute(
            request, jobs, watcher, follower,
            may_restart=lambda: _times_stuck(store, self._spec.ref) <= self._restarts,
            keep_log=lambda job_id, log: None,
        )  # fmt: skip

    @property
    def attempts(self) -> list[Attempt]:
        return Attempts(self._repository.store, self._spec.ref).all()

    def stacks(self, cache: Path) -> dict[int, str]:
        """The stacks of all processes, by the number of the attempt that was stuck."""
        return {
            int(str(each.metrics["step"])): (self._repository.fetch(each.ref, cache) / STACKS_FILE).read_text("utf-8")
            for each in self._repository.list_artifacts("sft.stacks")
        }

    def result(self, cache: Path) -> tuple[str, list[dict[str, Any]]]:
        return results(self._repository, self._repository.manifest(self._spec.ref), cache)
