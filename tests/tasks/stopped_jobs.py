"""An SFT job of many short steps, no checkpoint of which is due, and its watcher, which acts in the middle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.artifacts.store import Store
from rlhf_core.config.engines.placement import Placement
from rlhf_core.config.stages.language_models import SFTConfig
from rlhf_core.contract import Input
from rlhf_core.tracking.protocol import Progress
from tasks.followers import Follower
from tasks.job_request import JobRequest
from tasks.ray_jobs import RayJobs
from tasks.stage import _compute
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
    """Calls `act` once, in a thread, when the job has done 20 steps."""

    def __init__(self, act: Callable[[], object] | None = None) -> None:
        self.said: list[str] = []  # lines and phases
        self.cancel = threading.Event()
        self._act = act

    def submitted(self, job_id: str, attached: bool) -> None: ...

    def progress(self, progress: Progress) -> None:
        self.said.append(progress.phase)
        if progress.phase == "train" and 20 <= progress.step < STEPS and self._act is not None:
            act, self._act = self._act, None
            threading.Thread(target=act).start()

    def line(self, line: str) -> None:
        self.said.append(line)

    def cancelled(self) -> bool:
        return self.cancel.is_set()


class Run:
    """The stage in a store of its own, its recipe in `root`."""

    def __init__(self, store: Store, inputs: Mapping[str, Input], root: Path) -> None:
        self._repository = ArtifactRepository(store)
        self._spec: StageSpec = specified(self._repository, inputs, root, CONFIG, "sft")
        self.checkpoints = Checkpoints(store, self._spec.ref)

    def compute(self, jobs: RayJobs, watcher: Watcher) -> None:
        store, key = self._repository.store, self._spec.key
        command = f"exec python -m rlhf_core.stages --store {store.url} --stage sft --key {key}"
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        request = JobRequest(store.url, "sft", key, command, environment, {}, cpus=0.0)
        _compute(request, jobs, watcher, Follower(store, request.id_prefix, "run"))

    def result(self, cache: Path) -> tuple[str, list[dict[str, Any]]]:
        return results(self._repository, self._repository.manifest(self._spec.ref), cache)
