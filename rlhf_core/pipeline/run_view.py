"""A run and its stages as pages show them, from the documents and manifests in the store."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from rlhf_core.artifacts.costs import Cost, StageCost, total
from rlhf_core.artifacts.leases import holder_of
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.resources import AttemptUses, read_uses
from rlhf_core.artifacts.store import Store
from rlhf_core.config.prices import PricesConfig
from rlhf_core.errors import IntegrityError
from rlhf_core.pipeline.record import RunRecord, RunStart, newest_records
from rlhf_core.pipeline.run_costs import prices_of_run
from rlhf_core.report.content import Curves
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.run_diff import settings_that_differ
from rlhf_core.report.run_part import RunPart
from rlhf_core.report.timeline import phases

_PARALLEL_REQUESTS = 8
_RECENT_RUNS = 48  # before a run, among which the one of its recipe is looked for


@dataclass(frozen=True)  # without slots: `cached_property` keeps its value in the instance
class Run:
    """A run as far as the store knows it: its start, its record, or both."""

    run_id: str
    recipe: Mapping[str, Any]
    overrides: Sequence[str]
    started_at: datetime
    record: RunRecord | None  # None: it has not ended
    nodes: Mapping[str, ArtifactRef]
    tags: Sequence[str]

    @property
    def name(self) -> str:
        return str(self.recipe.get("name", ""))

    @property
    def outcome(self) -> str:
        if self.record is None:
            return "unfinished"
        if self.record.stopped:
            return "stopped"
        return "succeeded" if self.record.succeeded else "failed"

    @cached_property
    def cost(self) -> Cost | None:
        """Cost of its own attempts; None before it has ended, or if its record does not have them."""
        if self.record is None:
            return None
        costs = self.record.costs(self.prices)
        return total(costs, "own") if all(cost.is_known for cost in costs) else None

    @cached_property
    def prices(self) -> PricesConfig | None:
        return prices_of_run(self.recipe)

    @property
    def seconds(self) -> float | None:
        return None if self.record is None else (self.record.finished_at - self.record.started_at).total_seconds()


def run_of_record(record: RunRecord) -> Run:
    nodes = {node.name: node.ref for node in record.nodes}
    return Run(record.run_id, record.recipe, record.overrides, record.started_at, record, nodes, record.tags)


def newest_run(run_id: str, start: RunStart | None, record: RunRecord | None) -> Run | None:
    """Return the run by its record, or by its start if it runs for the first time or again; None without either."""
    if record is not None and record.is_newest(start):
        return run_of_record(record)
    if start is None:
        return None
    return Run(run_id, start.recipe, start.overrides, start.started_at, None, start.nodes, start.tags)


def node_view(repository: ArtifactRepository, run: Run, name: str) -> NodeView:
    """Return a stage of a run with its state now."""
    ref = run.nodes[name]
    manifest = repository.stored_manifest(ref)
    recorded = {node.name: node for node in run.record.nodes}.get(name) if run.record is not None else None
    if recorded is not None:
        return NodeView(name, ref, recorded.outcome, manifest, recorded.error)
    holder = "" if manifest is not None else holder_of(repository.store, ref)
    return NodeView(name, ref, "done" if manifest else "running" if holder else "waiting", manifest, holder=holder)


def run_part(
    repository: ArtifactRepository, run: Run, nodes: Sequence[NodeView],
    inputs: Mapping[str, Mapping[str, ArtifactRef]],
    costs: Sequence[StageCost], curves: Mapping[str, Curves], logged: Mapping[str, int],
) -> RunPart:  # fmt: skip
    """Return the part of a page about the run. curves, logged: of its stages, as far as they have some."""
    previous = _previous_run(repository.store, run)
    return RunPart(
        run.run_id, run.outcome, run.started_at, run.record.finished_at if run.record else datetime.now(UTC),
        run.record is not None, run.overrides, "" if previous is None else previous.run_id,
        [] if previous is None else settings_that_differ(previous.recipe, run.recipe), nodes, inputs, costs, run.prices,
        {name: found for name, of_node in curves.items() if (found := phases(of_node))}, logged,
        _uses(repository.store, nodes),
    )  # fmt: skip


def _uses(store: Store, nodes: Sequence[NodeView]) -> dict[str, list[AttemptUses]]:
    def read(node: NodeView) -> list[AttemptUses]:
        try:
            return read_uses(store, node.ref)
        except IntegrityError:  # the page of the stage says what is damaged
            return []

    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return {node.name: uses for node, uses in zip(nodes, pool.map(read, nodes), strict=True) if uses}


def _previous_run(store: Store, run: Run) -> RunRecord | None:
    """Return the run of the same recipe that started last before this one; None if it is not among those just before
    it.
    """
    for _, record in itertools.islice(newest_records(store, before=run.run_id), _RECENT_RUNS):
        if not isinstance(record, RunRecord):  # damaged
            continue
        if record.recipe.get("name") == run.name and record.started_at < run.started_at:
            return record
    return None


def inputs_of(repository: ArtifactRepository, node: NodeView) -> Mapping[str, ArtifactRef]:
    """Return the inputs of a stage; none of one whose job has not been submitted."""
    if node.manifest is not None:
        return node.manifest.parents
    return repository.read_spec(node.ref).inputs if repository.has_spec(node.ref) else {}
