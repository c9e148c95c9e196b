"""Tables of `plan` and `run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from rlhf_core.artifacts.costs import Part, StageCost, total
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.config.prices import PricesConfig
from rlhf_core.pipeline.estimates import Estimate
from rlhf_core.pipeline.expectations import Range
from rlhf_core.pipeline.plan import PlannedNode
from rlhf_core.pipeline.record import NodeRecord, RunRecord
from rlhf_core.report.formatting import amount, compared_metrics, duration, hours, main_metrics, money, with_interval

_SIDE_BY_SIDE = 4  # models, on a line of 80 characters
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
        table.add_row(node.name, _styled(node.action), node.why, ", ".join(node.reads), str(node.ref))
    return table


def estimate_table(estimates: Mapping[str, Estimate], prices: PricesConfig | None = None) -> Table:
    """Return the known costs of the nodes that must be computed."""
    table = Table(title="what it takes, as far as it can be seen here", title_justify="left")
    currency = "" if prices is None else prices.currency
    costs = ["cost"] if prices is not None else []
    sizes = ("memory of a worker", "of an engine", "reserves")
    for column in ("stage", "rows", "tokens", "steps", "time", *costs, *sizes):
        table.add_column(column, justify="left" if column in ("stage", "reserves") else "right", overflow="fold")
    for name, estimate in estimates.items():
        table.add_row(
            name, *(_count(value) for value in (estimate.rows, estimate.tokens, estimate.steps)),
            _range(estimate.time, duration),
            *(_range(estimate.money, lambda value: f"{amount(value)} {currency}") for _ in costs),
            _gib(estimate.memory.worker) or ("unknown" if estimate.unknown_memory else ""),
            _gib(estimate.memory.engine),
            "\n".join([_reserved(estimate.reserves), *(f"{n}: {_reserved(r)}" for n, r in estimate.groups.items())]),
        )  # fmt: skip
    captions = []
    if any(estimate.time is not None for estimate in estimates.values()):
        captions.append(
            "time: median of the results in the store of the same stage, size of model and devices, per token or step; "
            "in brackets the interval of 90 % of them (of few: from least to most; of one: half to twice)"
        )
    reasons = dict.fromkeys(estimate.unknown_memory for estimate in estimates.values() if estimate.unknown_memory)
    captions += [f"memory unknown: {reason}" for reason in reasons]
    if captions:
        table.caption, table.caption_justify = "\n".join(captions), "left"
    return table


def outcome_table(record: RunRecord, prices: PricesConfig | None = None) -> Table:
    took = (record.finished_at - record.started_at).total_seconds()
    table = Table(title=f"{record.recipe['name']}: {duration(took)}", title_justify="left")
    table.add_column("stage")
    table.add_column("")
    table.add_column("time", justify="right")
    table.add_column("cost", justify="right")
    table.add_column("metrics", overflow="fold")
    for node, cost in zip(record.nodes, record.costs(prices), strict=True):
        table.add_row(
            node.name,
            _styled(node.outcome),
            _time(node),
            _cost(cost, prices),
            node.error or main_metrics(node.metrics),
        )
    return table


def cost_totals(costs: Sequence[StageCost], prices: PricesConfig | None) -> Iterator[str]:
    """Yield a line for what a run took itself, for attempts of other runs, and for what reuse saved."""
    labels: dict[Part, str] = {
        "own": "this run",
        "others": "attempts of other runs at these stages",
        "saved": "saved by reuse",
    }
    for part, label in labels.items():
        cost = total(costs, part)
        if cost.seconds or part == "own":
            took = f"{hours(cost.gpu_seconds)} GPU hours, {hours(cost.core_seconds)} core hours"
            yield f"{label}: {money(cost, prices) or 'no prices are set'} ({took})"
        if cost.unpriced:
            yield f"{label}: without a price are {', '.join(sorted(cost.unpriced))}"


def comparison_tables(record: RunRecord) -> Iterator[Table]:
    """Yield, for each evaluation stage, the models that it evaluated side by side, as many as there is room for."""
    for stage, models in record.evaluations.items():
        names = compared_metrics(models)
        for start in range(0, len(models), _SIDE_BY_SIDE):
            shown = dict(list(models.items())[start : start + _SIDE_BY_SIDE])
            table = Table(title=f"{stage}: on the held-out prompts (95 % intervals)", title_justify="left")
            table.add_column("")
            for model in shown:
                table.add_column(model, justify="right")
            for name in names:
                table.add_row(name, *(with_interval(metrics, name) for metrics in shown.values()))
            yield table


def size_text(num_bytes: int) -> str:
    """Format `512 B`, `3 kB`, `1.2 TB`."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _time(node: NodeRecord) -> str:
    return duration(node.seconds) if node.outcome in ("reused", "computed") else ""


def _cost(cost: StageCost, prices: PricesConfig | None) -> str:
    """Format money, else the GPUs' or cores' hours; of a reused stage, what that saved."""
    spent = cost.own + cost.others + cost.saved
    kind, seconds = ("GPU", spent.gpu_seconds) if spent.gpu_seconds else ("core", spent.core_seconds)
    shown = money(spent, prices) or f"{hours(seconds)} {kind} h"
    return f"saved {shown}" if cost.saved.seconds else shown if spent.seconds else ""


def _range(expected: Range | None, shown: Callable[[float], str]) -> str:
    if expected is None:
        return "not run before"
    return f"≈ {shown(expected.expected)} ({shown(expected.low)} to {shown(expected.high)})"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _gib(size: float) -> str:
    return f"≈ {size / 2**30:.2g} GiB" if size else ""


def _reserved(reserves: Reservation) -> str:
    amounts = {"CPU": reserves.cpus, "GPU": reserves.gpus}
    return ", ".join(f"{amount:g} {what}{'s' * (amount != 1)}" for what, amount in amounts.items() if amount)


def _styled(word: str) -> Text:
    return Text(word, _STYLES[word])
