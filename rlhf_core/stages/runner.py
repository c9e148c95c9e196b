"""The job around a stage: spec → lease → inputs → the stage's function → artifact. Imports no torch.

Its output carries the messages of rlhf_core/tracking/protocol.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.leases import Lease, wait_for_lease
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.chat.ends_of_turn import write_ends_of_turn
from rlhf_core.config.base import Role
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.config.inputs import roles_of_inputs
from rlhf_core.config.plugins import require, requiring
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.config.tracking import TrackingConfig
from rlhf_core.contract import KINDS_OF_ROLE, Input, Output, Stage
from rlhf_core.data.reading import NO_IMAGES, has_images
from rlhf_core.errors import StageError
from rlhf_core.stages.attempt import RecordedAttempt
from rlhf_core.stages.hang import Stop, watched
from rlhf_core.stages.job_context import JobContext, workdir_root
from rlhf_core.stages.key import computing_libraries, stage_key, used_libraries
from rlhf_core.stages.manifests import manifest_of
from rlhf_core.stages.resources import recorded
from rlhf_core.stages.table import STAGES
from rlhf_core.system.scratch import scratch_folder
from rlhf_core.system.stopping import STOPS
from rlhf_core.tracking.progress import ProgressReporter
from rlhf_core.tracking.protocol import SAMPLES_FILE
from rlhf_core.tracking.tracker import Tracker

if TYPE_CHECKING:
    from rlhf_core.stages.cluster import Cluster


def _ray_cluster() -> Cluster:
    from rlhf_core.stages.ray_cluster import RayCluster

    return RayCluster()


def run_job(
    store_url: str,
    ref: ArtifactRef,
    stages: Mapping[str, Stage] = STAGES,
    *,
    cluster: Callable[[], Cluster] = _ray_cluster,
    progress: ProgressReporter | None = None,
    again: bool = False,
    stop: Stop | None = None,
) -> Manifest:
    """Compute the artifact `ref` by its spec, unless it exists; return the store's manifest.

    cluster: for a stage's actors. again: compute it in any case, and return the new manifest; its files are in
    the store, and the manifest too unless there was one. stop: ends this process once it has hung; None: it may
    hang.
    Waits while another job computes it. Raises StageError, StoreError, or the stage's own exceptions.
    """
    repository = ArtifactRepository(open_store(store_url))
    spec = repository.read_spec(ref)
    stage, config = _checked(spec, stages)
    progress = progress or ProgressReporter()
    lease = wait_for_lease(
        repository.store,
        ref,
        done=lambda: not again and repository.manifest(ref) is not None,
        waiting=lambda who: progress.report(0, 0, f"waiting for {who}, which computes the same"),
    )
    if lease is not None:
        with lease:
            # The last holder may have published after `done` was called.
            if not again and (manifest := repository.manifest(ref)) is not None:
                return manifest
            computed, stored = _compute(repository, spec, stage, config, cluster, progress, lease, stop)
            return computed if again else stored
    stored_manifest = repository.manifest(ref)
    if stored_manifest is None:
        raise StageError(f"{ref} was deleted from the store a moment ago: run again")
    print(f"{ref} is in the store already", flush=True)
    return stored_manifest


def _compute(
    repository: ArtifactRepository,
    spec: StageSpec,
    stage: Stage,
    config: StageConfig,
    cluster: Callable[[], Cluster],
    progress: ProgressReporter,
    lease: Lease,
    stop: Stop | None,
) -> tuple[Manifest, Manifest]:
    """Return the result, whose files are stored, and the stored manifest: another process's if that was first."""
    started = datetime.now(UTC)
    parents = [repository.stored_manifest(ref) for ref in spec.inputs.values()] if config.input_copies else []
    attempt = RecordedAttempt(
        Attempts(repository.store, spec.ref), lease.holder, started,
        run_id=spec.run_id, reserved=stage.reserves(config), device=_device(config.reserves()),
        memory=stage.job_memory(config, [parent for parent in parents if parent is not None]),
    )  # fmt: skip
    lease.start(on_loss=_interrupt_job, on_renewal=attempt.beat)
    with attempt, _workdir(spec) as folder, _stops_when_lost(lease), requiring(spec.plugins):
        tracker = Tracker(
            folder / "tracking", TrackingConfig.model_validate_json(json.dumps(spec.tracking)),
            name=spec.name, run_id=spec.run_id, key=spec.key, config=spec.config,
        )  # fmt: skip
        with tracker:
            (folder / "work").mkdir()
            context = JobContext(spec, repository.store, folder / "work", tracker, progress)
            if config.checkpoints is not None:
                attempt.follow(context.checkpoints, progress)
            progress.report(0, 0, "fetch inputs")
            roles = roles_of_inputs(config)
            inputs = {name: _input(stage, name, roles.get(name, ()), ref, context) for name, ref in spec.inputs.items()}
            actors = (cluster(),) if stage.runs == "actors" else ()
            measuring = recorded(repository.store, spec.ref, started, lease.holder.id, actors)
            with measuring, watched(spec, context, attempt, actors, stop):
                output: Output = resolve_name(stage.entry)(config, inputs, context, *actors)
            tracker.log_samples(output.folder / SAMPLES_FILE)
        _check_output(stage, output)
        if output.kind in (Kind.BASE_MODEL, Kind.POLICY):
            write_ends_of_turn(output.folder)
        tracker.keep(output.folder)
        context.keep_rollouts(output.folder)
        progress.report(0, 0, "publish")
        lease.check()
        published = manifest_of(spec, output, spec.ref, spec.name, started, attempts=attempt.published())
        computed = repository.upload(published, output.folder)
        stored = repository.commit(computed)
        if stored is not computed:
            attempt.ended_second()
        context.checkpoints.clear()
        context.live.clear()
        return computed, stored


def _checked(spec: StageSpec, stages: Mapping[str, Stage]) -> tuple[Stage, StageConfig]:
    """Return the stage and its config. Raises StageError or PluginError if this job would compute another result."""
    require(spec.plugins)
    stage = stages.get(spec.stage)
    if stage is None or stage.version != spec.stage_version:
        here = "does not know it" if stage is None else f"has version {stage.version}"
        raise StageError(
            f"stage {spec.stage}, version {spec.stage_version}, was asked for, but the code on the cluster {here}: "
            "give both the same release"
        )
    config = stage.config.model_validate_json(json.dumps(spec.config))
    installed = computing_libraries() | {name: v for name, v in spec.plugins.items() if name in spec.libraries}
    there, here_too = used_libraries(config, spec.libraries), used_libraries(config, installed)
    differing = [
        f"{name} {there.get(name, 'none')} there, {here_too.get(name, 'none')} here"
        for name in sorted(there.keys() | here_too.keys())
        if there.get(name) != here_too.get(name)
    ]
    if differing:
        raise StageError(
            f"the key was computed for other libraries than this job has: {'; '.join(differing)}: "
            "install the same on the cluster as where the run is started"
        )
    key = stage_key(
        stage, config,
        inputs=spec.inputs, user_files=spec.user_files, pins=spec.pins, seed=spec.seed, libraries=spec.libraries,
        rerun=spec.rerun,
    )  # fmt: skip
    if key != spec.key:
        raise StageError(
            f"the code on the cluster computes the key {key[:12]} from the spec of {spec.ref}: it is not the code that "
            "the run was started with; give both the same release"
        )
    return stage, config


def _input(stage: Stage, name: str, roles: Sequence[Role], ref: ArtifactRef, context: JobContext) -> Input:
    item = context.fetch(ref, only=_files(stage, name))
    if stage.reads_all:
        return item
    kinds = frozenset[Kind]().union(*(KINDS_OF_ROLE[role] for role in roles))
    if item.manifest.kind not in kinds:
        takes = ", ".join(sorted(kinds)) or "no such input"
        raise StageError(f"{stage.name}: the input {name} is a {item.manifest.kind}, but the stage takes: {takes}")
    if item.manifest.kind == Kind.DATASET and has_images(item.folder) and not stage.reads_images:
        raise StageError(f"{stage.name}: the input {name} has rows with images, and it reads text alone: {NO_IMAGES}")
    return item


def _files(stage: Stage, name: str) -> frozenset[str] | None:
    """Return the files of the input `name` that the stage fetches; None: all."""
    return next((files for pattern, files in stage.files.items() if fnmatchcase(name, pattern)), None)


def _check_output(stage: Stage, output: Output) -> None:
    if output.kind not in stage.writes:
        raise StageError(f"{stage.name} wrote a {output.kind}, but it is to write {', '.join(sorted(stage.writes))}")


def _device(reserved: Reservation) -> str:
    """Return the device of the computation: the name of this node's GPU if GPUs are reserved, else `cpu`."""
    if not reserved.gpus:
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):  # the job itself may live on a node without one
        return "gpu"
    return names[0].strip() or "gpu"


@contextmanager
def _workdir(spec: StageSpec) -> Iterator[Path]:
    with scratch_folder(f"{spec.stage}-{spec.key[:8]}", workdir_root()) as folder:
        yield folder


def _interrupt_job() -> None:
    """Interrupt the main thread, from the heartbeat's; a signal reaches it also while it waits."""
    STOPS.between_steps, STOPS.superseded = False, True
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _stops_when_lost(lease: Lease) -> Iterator[None]:
    """Convert an interruption by the loss of the lease into its StageError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        lease.check()
        raise
