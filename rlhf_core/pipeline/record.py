"""Record of a run's inputs and results: JSON documents in the store, start.json and run.json below runs/<run id>/."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.costs import StageCost, stage_cost
from rlhf_core.artifacts.deletions import wait_for_deletions
from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import ArtifactRef, MetricValue
from rlhf_core.artifacts.store import Store, is_path
from rlhf_core.config.base import Config
from rlhf_core.config.prices import PricesConfig
from rlhf_core.errors import IntegrityError, StoreError, one_line

_PARALLEL_REQUESTS = 16
_LISTED = 3  # runs in the message about one that is unknown
_COMPARED = ("evaluation", "benchmark")  # stages with a node for each model
Outcome = Literal["reused", "computed", "failed", "not run"]


class NodeRecord(Config):
    name: str
    ref: ArtifactRef
    outcome: Outcome
    seconds: float = 0.0  # this run's; of a reused stage, the look-up
    metrics: dict[str, MetricValue] = Field(default_factory=dict)
    error: str = ""
    attempts: tuple[Attempt, ...] = ()  # all at its artifact so far, those of other runs too


class RunStart(Config):
    """The plan of a run, written before its first job."""

    run_id: str
    recipe: dict[str, Any]  # resolved
    overrides: tuple[str, ...]
    started_at: datetime
    nodes: dict[str, ArtifactRef]
    tags: tuple[str, ...] = ()  # that it was given
    reused: tuple[str, ...] = ()  # nodes whose results the store had before the run's first attempt


class NeededNode(Config):
    ref: ArtifactRef


class RunNeeds(Config):
    """The artifacts of a run that has started: the form of its record, before there is one."""

    nodes: tuple[NeededNode, ...]


class RunRecord(Config):
    run_id: str
    recipe: dict[str, Any]  # resolved
    overrides: tuple[str, ...]
    tags: tuple[str, ...] = ()  # that it was given
    rerun_from: str = ""  # `node@label`, which was computed again on purpose
    started_at: datetime
    finished_at: datetime
    nodes: tuple[NodeRecord, ...]
    stopped: bool = False  # cancelled, killed or over its budget, before all of its stages had ended

    def is_newest(self, start: RunStart | None) -> bool:
        """Return whether the run has not been started again since."""
        return start is None or start.started_at <= self.started_at

    @property
    def succeeded(self) -> bool:
        return all(node.outcome in ("reused", "computed") for node in self.nodes)

    def costs(self, prices: PricesConfig | None) -> list[StageCost]:
        return [stage_cost(node.name, node.outcome, node.attempts, self.run_id, prices) for node in self.nodes]

    @property
    def evaluations(self) -> Mapping[str, Mapping[str, Mapping[str, MetricValue]]]:
        """The metrics of each evaluation stage, by its name, and of each model that it evaluated."""
        metrics: dict[str, dict[str, Mapping[str, MetricValue]]] = {}
        for node in self.nodes:
            if node.ref.stage in _COMPARED:
                stage, _, model = node.name.partition(".")
                metrics.setdefault(stage, {})[model] = node.metrics
        return metrics


def record_path(run_id: str) -> str:
    return f"runs/{run_id}/run.json"


def needs_path(run_id: str) -> str:
    """Return the path of the artifacts that a run needs, which it writes when it starts."""
    return f"runs/{run_id}/needs.json"


def report_path(run_id: str) -> str:
    """Return the path of a run's HTML report in the store, beside its record."""
    return f"runs/{run_id}/report.html"


def report_json_path(run_id: str) -> str:
    """Return the path of the content of a run's report in the store."""
    return f"runs/{run_id}/report.json"


def write_record(store: Store, record: RunRecord) -> None:
    """Write the record; a retried run replaces it."""
    store.put(record_path(record.run_id), record.model_dump_json(indent=1).encode())


def write_needs(store: Store, run_id: str, refs: Collection[ArtifactRef]) -> None:
    """Write which artifacts a run will reuse or compute, so that a garbage collection keeps them; before it looks for
    them in the store. Waits for a collection that is deleting one of them.
    """
    needs = RunNeeds(nodes=tuple(NeededNode(ref=ref) for ref in refs))
    store.put(needs_path(run_id), needs.model_dump_json(indent=1).encode())
    wait_for_deletions(store, [ref.path for ref in refs])


def read_record(store: Store, run_id: str) -> RunRecord | None:
    data = store.get(record_path(run_id))
    return None if data is None else parsed(RunRecord, data, record_path(run_id), "the record of a run")


def start_path(run_id: str) -> str:
    return f"runs/{run_id}/start.json"


def write_start(store: Store, start: RunStart) -> None:
    """Write what a run is about to compute; a retried run replaces it."""
    store.put(start_path(start.run_id), start.model_dump_json(indent=1).encode())


def read_start(store: Store, run_id: str) -> RunStart | None:
    data = store.get(start_path(run_id))
    return None if data is None else parsed(RunStart, data, start_path(run_id), "the start of a run")


def known_run(store: Store, run_id: str) -> tuple[RunRecord | None, RunStart | None]:
    """Return the record and the start of a run. Raises StoreError, which lists the newest runs, if it has neither."""
    is_id = "/" not in run_id and is_path(run_id)
    record, start = (read_record(store, run_id), read_start(store, run_id)) if is_id else (None, None)
    if record is None and start is None:
        ids = _newest_ids(store, "start.json", "run.json")
        listed = f"its newest are {', '.join(ids[:_LISTED])}, and `alignment runs` lists all"
        known = listed if ids else "it has none yet, `alignment run RECIPE` makes one"
        raise StoreError(f"{store.url} has no run `{one_line(run_id)}`: {known}")
    return record, start


def _newest_ids(store: Store, *names: str) -> list[str]:
    """Return the ids of the runs that have an object of one of these names, newest first."""
    paths = (path.split("/") for path in reversed(store.list("runs/")))
    return list(dict.fromkeys(parts[1] for parts in paths if len(parts) == 3 and parts[2] in names))


def newest_records(store: Store, before: str = "") -> Iterator[tuple[str, RunRecord | IntegrityError]]:
    """Yield each run's id and record, newest first, or in its place the error of a damaged one.

    before: the id of a run; only runs that were made before it.

    Only as many records are read as are asked for, in steps: Prefect's ids of runs, UUIDs of version 7, sort by the
    time at which they were made.
    """

    def read(run_id: str) -> RunRecord | IntegrityError | None:
        try:
            return read_record(store, run_id)
        except IntegrityError as error:
            return error

    run_ids = [run_id for run_id in _newest_ids(store, "run.json") if not before or run_id < before]
    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        for start in range(0, len(run_ids), _PARALLEL_REQUESTS):
            step = run_ids[start : start + _PARALLEL_REQUESTS]
            yield from (
                (run_id, record)
                for run_id, record in zip(step, pool.map(read, step), strict=True)
                if record is not None
            )
