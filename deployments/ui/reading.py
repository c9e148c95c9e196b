"""Runs, stages, metrics and logged rollouts, as the pages read them from the store. Writes nothing."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from deployments.ui.data_rows import DataRows
from rlhf_core.artifacts.live import LiveFiles
from rlhf_core.artifacts.logged_rollouts import (
    IMAGES_FOLDER,
    KEPT_ROLLOUTS,
    ROLLOUTS_FOLDER,
    LoggedStep,
    decode_step,
    logged_files,
    rollouts_file,
    step_of,
)
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from rlhf_core.artifacts.store import is_path
from rlhf_core.contract import Input
from rlhf_core.data.reading import IMAGES_FOLDER as DATASET_IMAGES
from rlhf_core.errors import AlignmentError, IntegrityError, StoreError, one_line
from rlhf_core.evaluation.stored import EVALUATING, difference, differences, evaluations_of
from rlhf_core.evaluation.verdict import Comparison, Criterion
from rlhf_core.pipeline.record import read_record, read_start
from rlhf_core.pipeline.run_costs import RunCosts, run_costs
from rlhf_core.pipeline.run_view import Run, inputs_of, newest_run, node_view
from rlhf_core.pipeline.stopped_runs import stopped_record
from rlhf_core.report.content import Content, Curves, curves_of, gather
from rlhf_core.report.node_view import NodeView
from rlhf_core.tracking.protocol import METRICS_FILE, SAMPLES_FILE, VERDICT_FILE
from tasks.followers import follows

_READERS = 16
_FRESH_SECONDS = 60.0  # for which a finished run is not read again: a retry replaces it
_SAMPLES = 12  # prompts of an evaluation, on a run's page

T = TypeVar("T")


class NotFoundError(AlignmentError):
    """Raised for something that the store does not have."""


class StoreReader:
    """Reads a store for pages; safe to use from several threads."""

    def __init__(self, repository: ArtifactRepository, cache: Path):
        """cache: a folder for files of artifacts, as of a node."""
        self.repository = repository
        self.rows = DataRows(repository.store)
        self.cache = cache
        self._runs: dict[str, tuple[float, Run]] = {}
        self._manifests: dict[ArtifactRef, Manifest] = {}
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        self.pool = ThreadPoolExecutor(_READERS, thread_name_prefix="ui")

    def runs(self) -> list[Run]:
        """Return all runs, the newest first. A document that cannot be read is left out: others can write there."""
        paths = self.repository.store.list("runs/")
        ids = dict.fromkeys(path.split("/")[1] for path in paths if path.endswith(("/run.json", "/start.json")))
        runs = [run for run in self.pool.map(self._readable_run, ids) if run is not None]
        return sorted(runs, key=lambda run: run.started_at, reverse=True)

    def run(self, run_id: str) -> Run | None:
        """Return a run, or None if the store has none of this id. Raises IntegrityError if its document is damaged."""
        with self._lock:
            read_at, cached = self._runs.get(run_id, (0.0, None))
        if cached is not None and time.monotonic() - read_at < _FRESH_SECONDS:
            return cached
        store = self.repository.store
        start, record = read_start(store, run_id), read_record(store, run_id)
        if start is not None and (record is None or not record.is_newest(start)):
            record = stopped_record(self.repository, start, follows) or record
        run = newest_run(run_id, start, record)
        if run is not None and run.record is not None:
            with self._lock:
                self._runs[run_id] = time.monotonic(), run
        return run

    def known_run(self, run_id: str) -> Run:
        """Return a run. Raises NotFoundError if the store has none of this id, IntegrityError if it is damaged."""
        run = self.run(run_id) if "/" not in run_id and is_path(run_id) else None
        if run is None:
            url = self.repository.store.url
            raise NotFoundError(f"{url} has no run {one_line(run_id)}: `alignment runs` lists those that there are")
        return run

    def nodes(self, run: Run) -> list[NodeView]:
        """Return the stages of a run with their states now."""
        return list(self.pool.map(lambda name: node_view(self.repository, run, name), run.nodes))

    def node(self, run: Run, name: str) -> NodeView | None:
        """Return one stage of a run with its state now; None if the run has none of this name."""
        return node_view(self.repository, run, name) if name in run.nodes else None

    def content(self, nodes: Sequence[NodeView]) -> tuple[Content | None, list[str]]:
        """Return the content of the report for the stages that are done, None if none is; and why some of these cannot
        be read.
        """
        done = [node for node in nodes if node.manifest is not None and node.manifest.kind != Kind.REPORT]
        read = dict(zip((node.name for node in done), self.pool.map(self._input, done), strict=True))
        inputs = {name: each for name, each in read.items() if isinstance(each, Input)}
        problems = [f"{name}: {each}" for name, each in read.items() if isinstance(each, StoreError)]
        return gather(inputs, samples=_SAMPLES) if inputs else None, problems

    def costs(self, run: Run) -> RunCosts:
        """Return what the stages of a run took, also of one that has not ended."""
        if run.record is not None:
            return RunCosts(run.name, run.prices, run.record.costs(run.prices))
        return run_costs(self.repository, run.run_id)

    def difference(self, before: Manifest, after: Manifest, criterion: Criterion) -> Comparison | None:
        """Return the difference of two evaluations; None if they are not comparable."""
        return self.once(
            (before.ref, after.ref, criterion),
            lambda: difference(self.repository, before, after, criterion, self.cache),
        )

    def differences(self, baseline: ArtifactRef, candidate: ArtifactRef) -> Sequence[Comparison]:
        """Return the differences of two models by the evaluations that both have."""
        refs = [ref for stage in EVALUATING for ref in self.repository.refs(stage)]
        found = evaluations_of(self.repository, (baseline, candidate), self.manifests(refs))
        return self.once(
            ("differences", baseline, candidate, tuple(each.ref for each in found)),
            lambda: list(differences(self.repository, baseline, candidate, found, self.cache)),
        )

    def manifests(self, refs: Iterable[ArtifactRef]) -> list[Manifest]:
        """Return the manifests of artifacts, each read once; without those that are gone or damaged."""
        return [manifest for manifest in self.pool.map(self._manifest, refs) if manifest is not None]

    def _manifest(self, ref: ArtifactRef) -> Manifest | None:
        with self._lock:
            known = self._manifests.get(ref)
        if known is not None:
            return known
        try:
            manifest = self.repository.stored_manifest(ref)
        except IntegrityError:
            return None
        if manifest is not None:
            with self._lock:
                self._manifests[ref] = manifest
        return manifest

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returns, which is called once for the key: for what never changes in a store."""
        with self._lock:
            if key in self._made:
                return cast(T, self._made[key])
        made = make()
        with self._lock:
            self._made[key] = made
        return made

    def curves(self, node: NodeView) -> Curves:
        """Return the metrics of a stage that is done or still computed, by name. Raises StoreError if they are gone."""
        if node.manifest is not None:
            return curves_of(self.repository.fetch(node.ref, self.cache, {METRICS_FILE}) / METRICS_FILE)
        return curves_of(LiveFiles(self.repository.store, node.ref).get(METRICS_FILE) or b"")

    def logged_steps(self, node: NodeView) -> list[int]:
        """Return the steps of which rollouts are logged, in order."""
        if node.manifest is not None:
            return list(logged_files(node.manifest))
        paths = LiveFiles(self.repository.store, node.ref).paths(f"{ROLLOUTS_FOLDER}/")
        return sorted(step for path in paths if (step := step_of(path)) is not None)

    def logged_step(self, node: NodeView, step: int) -> LoggedStep | None:
        """Return the logged rollouts of a step; None if it has none. Raises IntegrityError if they are damaged."""
        data = self._rollouts(node, rollouts_file(step))
        return None if data is None else decode_step(data, f"{node.ref}: the rollouts of step {step}")

    def nearest_step(self, node: NodeView, asked: int) -> tuple[list[int], LoggedStep]:
        """Return the logged steps, and the rollouts of the one that was asked for, or of the nearest before it, else
        of the first.

        Raises NotFoundError if none is logged.
        """
        steps = self.logged_steps(node)
        if not steps:
            raise NotFoundError(f"{node.name} has no logged rollouts: `log_rollouts` is none, or no step has ended yet")
        nearest = max((step for step in steps if step <= asked), default=steps[0])
        logged = self.logged_step(node, nearest)
        if logged is None:
            raise NotFoundError(
                f"the rollouts of step {nearest} of {node.name} are gone: the stage has just ended, ask again"
            )
        return steps, logged

    def image(self, node: NodeView, sha256: str) -> bytes | None:
        """Return an image of the rows that a stage has made or evaluated on, or of logged rollouts; None if there is
        none of this name.
        """
        if node.manifest is not None and node.manifest.kind in (Kind.DATASET, Kind.EVALUATION):
            return self.file(node, f"{DATASET_IMAGES}/{sha256}")
        return self._rollouts(node, f"{IMAGES_FOLDER}/{sha256}")

    def _rollouts(self, node: NodeView, file: str) -> bytes | None:
        if node.manifest is None:
            return LiveFiles(self.repository.store, node.ref).get(f"{ROLLOUTS_FOLDER}/{file}")
        return self.file(node, f"{KEPT_ROLLOUTS}/{file}")

    def inputs(self, nodes: Sequence[NodeView]) -> dict[str, Mapping[str, ArtifactRef]]:
        """Return the inputs of stages; none of one whose job has not been submitted."""
        inputs = self.pool.map(lambda node: inputs_of(self.repository, node), nodes)
        return dict(zip((node.name for node in nodes), inputs, strict=True))

    def file(self, node: NodeView, path: str) -> bytes | None:
        """Return a file of a stage's result; None if it has none of this path. Raises IntegrityError if damaged."""
        files = () if node.manifest is None else node.manifest.files
        entry = next((each for each in files if each.path == path), None)
        data = None if entry is None else self.repository.store.get(blob_path(entry.sha256))
        if entry is not None and data is not None and hashlib.sha256(data).hexdigest() != entry.sha256:
            raise IntegrityError(f"{node.ref}: {entry.path} is damaged: `alignment repair` takes it out of use")
        return data

    def _readable_run(self, run_id: str) -> Run | None:
        try:
            return self.run(run_id)
        except IntegrityError:
            return None

    def _input(self, node: NodeView) -> Input | StoreError:
        """Return the files of a stage that is done, or why the store cannot give them."""
        assert node.manifest is not None
        try:
            folder = self.repository.fetch(node.ref, self.cache, {METRICS_FILE, SAMPLES_FILE, VERDICT_FILE})
        except StoreError as error:
            return error
        return Input(node.manifest, folder)
