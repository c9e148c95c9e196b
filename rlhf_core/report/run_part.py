"""The part of a page about one run: its stages, their lineage, when they ran, and what they cost.

The results of a report may be of several runs, so this part is put into the page of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rlhf_core.artifacts.costs import Part, StageCost, total
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.resources import AttemptUses
from rlhf_core.config.prices import PricesConfig
from rlhf_core.report.bounds import Limits
from rlhf_core.report.charts import COLOURS, MOST_POINTS
from rlhf_core.report.formatting import money
from rlhf_core.report.lineage import lineage_picture
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.resource_charts import resource_charts
from rlhf_core.report.timeline import Phase, time_line

_PARTS: Sequence[Part] = ("own", "others", "saved")
_POINTS = 0.2  # of the limit of curves: these are many, of each process of each stage
_STAGES, _ATTEMPTS = 4, 0.25  # of the limit of lists: each stage is a few short lines, and so is each attempt


@dataclass(frozen=True, slots=True)
class RunPart:
    run_id: str
    outcome: str
    started_at: datetime
    ended_at: datetime  # now, while it runs
    is_finished: bool
    overrides: Sequence[str]
    previous: str  # id of the run of this recipe before it; empty: none is known
    changes: Sequence[tuple[str, Any, Any]]  # settings that differ from it: path, value before and after
    nodes: Sequence[NodeView]
    inputs: Mapping[str, Mapping[str, ArtifactRef]]
    costs: Sequence[StageCost]
    prices: PricesConfig | None
    phases: Mapping[str, Sequence[Phase]]  # of its RL stages
    logged: Mapping[str, int]  # stage -> its last logged step that the page shows
    uses: Mapping[str, Sequence[AttemptUses]] = field(default_factory=dict)  # of its stages that measured some


def run_context(part: RunPart, place: Callable[[str], str], limits: Limits | None = None) -> dict[str, Any]:
    """Return what the template of the part needs. place: the address of a stage."""
    nodes, costs, changes = part.nodes, {cost.name: cost for cost in part.costs}, part.changes
    attempts = {name: cost.attempts for name, cost in costs.items()}
    points = MOST_POINTS
    if limits is not None:
        nodes, changes = nodes[: int(limits.items * _STAGES)], changes[: limits.items]
        points = max(2, int(limits.points * _POINTS))
        newest = max(1, int(limits.items * _ATTEMPTS))
        attempts = {name: of_stage[-newest:] for name, of_stage in attempts.items()}
    return {
        "part": part, "place": place, "nodes": nodes, "stages_left_out": len(part.nodes) - len(nodes),
        "changes": changes, "changes_left_out": len(part.changes) - len(changes), "attempts": attempts,
        "costs": [costs[node.name] for node in nodes if node.name in costs],
        "unknown": [cost.name for cost in part.costs if not cost.is_known],
        "totals": {each: total(part.costs, each) for each in _PARTS}, "money": lambda cost: money(cost, part.prices),
        "logged": part.logged, "colours": COLOURS, "phases": part.phases,
        "lineage": lineage_picture(nodes, part.inputs),
        "resources": {
            node.name: resource_charts(part.uses[node.name], points) for node in nodes if node.name in part.uses
        },
        "time": time_line(part.run_id, part.started_at, part.ended_at, nodes, attempts, part.inputs),
    }  # fmt: skip
