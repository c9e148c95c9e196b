"""The contract of a stage with checkpoints: stopped and resumed, it leaves the same bytes as without the stop."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.contract import Input, Stage
from rlhf_core.graph.user_files import user_files
from rlhf_core.stages.cluster import Cluster
from rlhf_core.stages.in_process import InProcessCluster
from rlhf_core.stages.key import computing_libraries, stage_key
from rlhf_core.stages.runner import run_job
from rlhf_core.tracking.progress import ProgressReporter
from rlhf_core.tracking.protocol import METRICS_FILE


@dataclass(frozen=True)
class StageRun:
    """A short run: it writes a checkpoint, and takes at least two steps after it."""

    stage: Stage
    config: StageConfig
    inputs: Mapping[str, Input]
    root: Path = Path()  # of the user's files that `config` names


class StageContract:
    """Subclass it with `make`. It is stopped at its first report after a checkpoint of more than `stop_after` steps."""

    stop_after: ClassVar[int] = 0

    def make(self, folder: Path) -> StageRun:
        """Return the run, whose inputs may be written to `folder`."""
        raise NotImplementedError

    def cluster(self) -> Cluster:
        """Return a cluster that starts ranks and engines in this process."""
        return InProcessCluster()

    def test_a_stopped_run_ends_as_if_it_had_not_been_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for variable in ("ALIGNMENT_CACHE", "ALIGNMENT_WORKDIR"):
            monkeypatch.setenv(variable, str(tmp_path / variable))
        run = self.make(tmp_path)
        whole, stopped = (_Attempts(run, self.cluster, tmp_path / name) for name in ("whole", "stopped"))
        whole.attempt()
        with pytest.raises(_Stopped):
            stopped.attempt(stop_after=self.stop_after)
        step, settings = stopped.checkpoints.newest_step(), run.config.checkpoints
        assert step is not None
        assert settings is not None
        _draw_other_random_numbers()
        progress = stopped.attempt()
        assert progress.phases & {f"resumes after step {step}", f"resumes {settings.position(step)}"}
        assert progress.last_step >= step + 2, "too few steps follow the checkpoint to show a difference"
        assert stopped.checkpoints.newest_step() is None, "an artifact that is there needs no checkpoint"
        assert stopped.results() == whole.results()


class _Stopped(BaseException):
    """Raised in the run in place of a kill; no stage catches it."""


class _Progress(ProgressReporter):
    """Stops the run, if requested, at its first report after a checkpoint of more than `stop_after` steps."""

    def __init__(self, checkpoints: Checkpoints, stop_after: int | None) -> None:
        super().__init__(write=lambda line: None)
        self._checkpoints, self._stop_after = checkpoints, stop_after
        self.phases: set[str] = set()
        self.last_step = 0

    def report(self, step: int, total: int, phase: str = "", metrics: Mapping[str, float] | None = None) -> None:
        for thread in threading.enumerate():  # on a busy machine a checkpoint that is due would be left out
            if thread.name.startswith("checkpoint "):
                thread.join()
        self.phases.add(phase)
        self.last_step = max(self.last_step, step)
        if self._stop_after is not None and (self._checkpoints.newest_step() or 0) > self._stop_after:
            raise _Stopped


class _Attempts:
    """The attempts of one run, in a store of its own."""

    def __init__(self, run: StageRun, cluster: Any, folder: Path) -> None:
        self._cluster = cluster
        self._repository = ArtifactRepository(open_store(str(folder / "store")))
        self._cache = folder / "cache"
        self._spec = _stored_spec(run, self._repository)
        self.checkpoints = Checkpoints(self._repository.store, self._spec.ref)
        self._inputs = {manifest.ref for manifest in self._repository.list_artifacts()}

    def attempt(self, stop_after: int | None = None) -> _Progress:
        progress = _Progress(self.checkpoints, stop_after)
        run_job(self._repository.store.url, self._spec.ref, cluster=self._cluster, progress=progress)
        return progress

    def results(self) -> dict[str, Any]:
        """Return files, metrics and log of the artifact, and of all that the stage published before it."""
        results: dict[str, Any] = {}
        for manifest in self._repository.list_artifacts():
            if manifest.ref in self._inputs:
                continue
            files = {file.path: file.sha256 for file in manifest.files}
            if files.pop(METRICS_FILE, None):
                log = (self._repository.fetch(manifest.ref, self._cache) / METRICS_FILE).read_bytes()
                results[f"{manifest.name} log"] = [without_times(json.loads(line)) for line in log.splitlines()]
            results[manifest.name] = files, without_times(manifest.metrics)
        return results


def _stored_spec(run: StageRun, repository: ArtifactRepository) -> StageSpec:
    """Return the spec of the run, after storing all that its job reads."""
    inputs = {name: repository.publish(item.manifest, item.folder).ref for name, item in run.inputs.items()}
    files, libraries = user_files(run.config, run.root), computing_libraries()
    for path in files:
        repository.put_blob(run.root / path)
    key = stage_key(run.stage, run.config, inputs=inputs, user_files=files, seed=0, libraries=libraries)
    spec = StageSpec(
        name=run.stage.name, stage=run.stage.name, stage_version=run.stage.version, key=key,
        config=run.config.model_dump(mode="json"), inputs=inputs, user_files=files, seed=0, libraries=libraries,
        tracking={"wandb": False, "tensorboard": False},
    )  # fmt: skip
    repository.write_spec(spec)
    return spec


def without_times(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reproducible metrics: no durations, no time of day."""
    return {name: value for name, value in metrics.items() if "second" not in name and name != "time"}


def _draw_other_random_numbers() -> None:
    """Move the random generators away from the state of the stopped run, as in a new process."""
    random.seed(1234)
    numpy.random.seed(1234)
    torch.manual_seed(1234)
