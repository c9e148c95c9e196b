"""The tables that `plan` and `run` print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from rich.markup import escape
from rich.table import Table

from rlhf_core.pipeline.plan import PlannedNode
from rlhf_core.pipeline.record import NodeRecord, RunRecord
from rlhf_core.report.formatting import compared_metrics, main_metrics, with_interval

_STYLES = {
    "reuse": "green",
    "reused": "green",
    "compute": "yellow",
    "computed": "cyan",
    "failed": "red",
    "not run": "dim",
}


def plan_table(recipe: str, nodes: Sequence[PlannedNode]) -> Table:
    compute = sum(node.action == "compute" for node in nodes)
    table = Table(title=f"{recipe}: {compute} to compute, {len(nodes) - compute} to reuse", title_justify="left")
    for column in ("stage", "", "why", "reads", "artifact"):
        table.add_column(column, overflow="fold", no_wrap=column not in ("why", "reads"))
    for node in nodes:
        table.add_row(node.name, _styled(node.action), escape(node.why), ", ".join(node.reads), str(node.ref))
    return table


def outcome_table(record: RunRecord) -> Table:
    took = (record.finished_at - record.started_at).total_seconds()
    table = Table(title=f"{record.recipe['name']}: {duration(took)}", title_justify="left")
    table.add_column("stage")
    table.add_column("")
    table.add_column("time", justify="right")
    table.add_column("metrics", overflow="fold")
    for node in record.nodes:
        table.add_row(
            node.name,
            _styled(node.outcome),
            _time(node),
            escape(node.error or main_metrics(node.metrics)),
        )
    return table


def comparison_tables(record: RunRecord) -> Iterator[Table]:
    """For each evaluation stage, the models that it evaluated side by side."""
    for stage, models in record.evaluations.items():
        table = Table(title=f"{stage}: on the held-out prompts (95 % intervals)", title_justify="left")
        table.add_column("")
        for model in models:
            table.add_column(model, justify="right")
        for name in compared_metrics(models):
            table.add_row(name, *(with_interval(metrics, name) for metrics in models.values()))
        yield table


def duration(seconds: float) -> str:
    """`0.2 s`, `47 s`, `3:05`, `1:02:03`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")


def _time(node: NodeRecord) -> str:
    return duration(node.seconds) if node.outcome in ("reused", "computed") else ""


def _styled(word: str) -> str:
    return f"[{_STYLES[word]}]{word}[/]"
