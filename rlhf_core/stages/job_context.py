"""The context of a stage that runs as a job: inputs and user files from the store, metrics to the trackers."""

from __future__ import annotations

import hashlib
import posixpath
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path, PurePosixPath

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.live import LiveFiles, LiveMetrics
from rlhf_core.artifacts.logged_rollouts import KEPT_ROLLOUTS, ROLLOUTS_FOLDER
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.artifacts.store import Store
from rlhf_core.contract import Input, Output
from rlhf_core.errors import StageError, StoreError
from rlhf_core.stages.manifests import manifest_of
from rlhf_core.system.scratch import new_folder
from rlhf_core.system.variables import folder_of
from rlhf_core.tracking.progress import ProgressReporter
from rlhf_core.tracking.tracker import Tracker


class JobContext:
    """Implements contract.StageContext. A pickled one opens the store again on arrival, and cannot log there."""

    def __init__(
        self,
        spec: StageSpec,
        store: Store,
        workdir: Path | None = None,
        tracker: Tracker | None = None,
        progress: ProgressReporter | None = None,
    ):
        self.name, self.key, self.libraries = spec.name, spec.key, spec.libraries
        self.checkpoints = Checkpoints(store, spec.ref)
        self.live = LiveFiles(store, spec.ref)
        self._live_metrics = LiveMetrics(self.live)
        self._spec = spec
        self._store = store
        self._given_workdir = workdir
        self._tracker = tracker
        self._progress = progress

    def __reduce__(self) -> tuple[Callable[..., JobContext], tuple[StageSpec, Store]]:
        return JobContext, (self._spec, self._store)

    @property
    def seed(self) -> int:
        if self._spec.seed is None:
            raise StageError(
                f"{self._spec.stage}: its settings say that it draws no random numbers (`draws`): its key has no seed"
            )
        return self._spec.seed

    @property
    def workdir(self) -> Path:
        return self._given_workdir or self._own_workdir

    def fetch(self, ref: ArtifactRef, only: Collection[str] | None = None) -> Input:
        """Return the artifact on this node, or its files in `only`."""
        repository = ArtifactRepository(self._store)
        manifest = repository.manifest(ref)
        if manifest is None:
            raise StoreError(
                f"{self._store.url} has no artifact {ref}, or not all its files: run again to compute it again"
            )
        return Input(manifest, repository.fetch(ref, node_cache(), only))

    def put_files(self, folder: Path) -> dict[str, str]:
        return ArtifactRepository(self._store).put_folder(folder, self._spec.ref)

    def get_files(self, files: Mapping[str, str], folder: Path) -> None:
        ArtifactRepository(self._store).get_folder(files, folder)

    def publish(self, what: str, step: int, output: Output) -> ArtifactRef:
        digest = hashlib.sha256(f"{self.key} {what} {step}".encode()).hexdigest()
        ref = ArtifactRef(stage=f"{self._spec.stage}.{what}", key=digest)
        output = replace(output, metrics={"step": step, **output.metrics})
        # The time is the stage's own.
        manifest = manifest_of(self._spec, output, ref, f"{self.name}.{what}.{step}", datetime.now(UTC))
        ArtifactRepository(self._store).publish(manifest, output.folder)
        print(f"kept {self.name}.{what}.{step} as {ref}", flush=True)
        return ref

    def user_file(self, path: str) -> Path:
        if path not in self._spec.user_files:
            raise StageError(f"{path}: no file of the recipe that this stage's key was computed with")
        return self._user_files / self._place(path)

    def user_folder(self, path: str) -> Path:
        folder = self._user_files / self._place(path)
        if not folder.is_dir():
            raise StageError(f"{path}: no folder of the recipe that this stage's key was computed with")
        return folder

    def pin(self, url: str) -> str | None:
        return self._spec.pins.get(url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        tracker = self._job_tracker()
        tracker.log(step, metrics)
        self._live_metrics.copy(tracker.logged)

    def keep_rollouts(self, folder: Path) -> None:
        """Write the logged rollouts of all attempts to the artifact's `folder`."""
        for path in self.live.paths(f"{ROLLOUTS_FOLDER}/"):
            if (data := self.live.get(path)) is not None:
                copy = folder / KEPT_ROLLOUTS / path.removeprefix(f"{ROLLOUTS_FOLDER}/")
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(data)

    def logged(self) -> bytes:
        return self._job_tracker().logged()

    def restore_log(self, lines: bytes) -> None:
        self._job_tracker().restore(lines)

    def _job_tracker(self) -> Tracker:
        if self._tracker is None:
            raise StageError("metrics are logged by the job itself: return them from the worker")
        return self._tracker

    def progress(self, step: int, total: int, phase: str = "", **metrics: float) -> None:
        if self._progress is None:
            raise StageError("progress is reported by the job itself: return it from the worker")
        self._progress.report(step, total, phase, metrics)

    @cached_property
    def _own_workdir(self) -> Path:
        return new_folder(f"{self._spec.stage}-{self.key[:8]}", workdir_root())

    @cached_property
    def _user_files(self) -> Path:
        """Folder with all user files, placed as in the recipe, so that imports between them work."""
        files = {self._place(path): sha256 for path, sha256 in self._spec.user_files.items()}
        return ArtifactRepository(self._store).materialise(files, node_cache())

    def _place(self, path: str) -> str:
        if path.startswith("/"):
            return posixpath.normpath(f"absolute{path}")
        # The recipe's own folder lies so deep that no `../` leads out of the whole.
        return posixpath.normpath("/".join(["recipe"] * self._depth + [path]))

    @cached_property
    def _depth(self) -> int:
        relative = (PurePosixPath(posixpath.normpath(p)) for p in self._spec.user_files if not p.startswith("/"))
        return 1 + max((path.parts.count("..") for path in relative), default=0)


def node_cache() -> Path:
    """Return the cache folder of this node, shared by all jobs: ALIGNMENT_CACHE, or below the home folder."""
    return folder_of("ALIGNMENT_CACHE") or Path.home() / ".cache" / "alignment"


def workdir_root() -> Path:
    """Return the root of jobs' working folders: ALIGNMENT_WORKDIR, or the system's temporary folder."""
    root = folder_of("ALIGNMENT_WORKDIR") or Path(tempfile.gettempdir())
    root.mkdir(parents=True, exist_ok=True)
    return root
