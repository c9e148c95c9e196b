"""`alignment diff`: runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from deployments.cli import panels
from deployments.cli.completion import run_ids
from deployments.cli.output import Printed, printing
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import RecipeError, one_line, shortened
from rlhf_core.pipeline.compared_runs import read_compared_run
from rlhf_core.report.formatting import duration, number, with_interval
from rlhf_core.report.run_diff import EvaluationDiff, MetricRow, RunDiff, SampleChange, diff_runs, own_costs
from tasks.followers import follows

app = typer.Typer()

_MOST = 6
_SHOWN = 120  # characters of a value or a text
_SHORT = 8  # characters of a run's id in a header, unless runs share them


@printing(app, panels.RESULTS)
def diff(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="IDs of two to six runs, as listed by `alignment runs`; the others are compared with the first.",
            metavar="RUN RUN…",
            autocompletion=run_ids,
        ),
    ],
    samples: Annotated[
        int, typer.Option(min=0, help="Number of prompts to show whose scores changed most, each way.")
    ] = 3,
) -> Printed[RunDiff]:
    """Compare runs: settings, inputs, code, evaluations with paired differences, metrics, times, samples."""
    if len(set(runs)) != len(runs) or not 2 <= len(runs) <= _MOST:
        raise RecipeError(f"`alignment diff` compares two to {_MOST} different runs: {len(set(runs))} given")
    repository = ArtifactRepository(open_store(store_url()))
    content = diff_runs([read_compared_run(repository, run, follows) for run in runs], samples=samples)
    return Printed(content, _text(content))


def _text(content: RunDiff) -> Iterator[RenderableType]:
    ids = [head.run for head in content.runs]
    names = dict(zip(ids, _short_ids(ids), strict=True))
    yield _runs(content, names)
    if costs := own_costs(content.runs):
        yield _table("taken by each run itself", [""], names, [[name, *texts] for name, texts in costs])
    if content.differences:
        yield _table("what differs", ["", "field"], names, [
            [each.section, each.field, *map(_value, each.values)] for each in content.differences
        ])  # fmt: skip
    else:
        yield "settings, inputs, code and libraries are the same"
    for evaluation in content.evaluations:
        yield from _evaluation(evaluation, names)
    if rows := _differing(content.metrics):
        yield _table("final metrics that differ", ["stage", "metric"], names, rows)
    times = [
        [each.stage, *(_time(*values) for values in zip(each.outcomes, each.seconds, each.device_seconds, strict=True))]
        for each in content.times
    ]
    yield _table("time, and device-seconds", ["stage"], names, times)


def _short_ids(ids: Sequence[str]) -> list[str]:
    """Return the last digits of each id: those of runs that were started in one minute begin alike."""
    length = next(n for n in range(_SHORT, 100) if len({run[-n:] for run in ids}) == len(ids))
    return [run[-length:] for run in ids]


def _runs(content: RunDiff, names: dict[str, str]) -> Table:
    table = Table("run", "", "recipe", "settings", "started", "time", "device-seconds")
    for head in content.runs:
        table.add_row(
            head.run, names[head.run], head.recipe, " ".join(head.settings), f"{head.started:%Y-%m-%d %H:%M}",
            duration(head.seconds), f"{head.device_seconds:.0f}",
        )  # fmt: skip
    return table


def _evaluation(evaluation: EvaluationDiff, names: dict[str, str]) -> Iterator[RenderableType]:
    metrics = [{row.metric: row.values[index] for row in evaluation.metrics} for index in range(len(names))]
    rows = [
        [row.metric, *(with_interval(each, row.metric) for each in metrics)]
        for row in evaluation.metrics
        if not row.metric.endswith(("_low", "_high"))
    ]
    yield _table(f"{evaluation.stage} (95 % intervals)", [""], names, rows)
    for run, why in evaluation.not_paired.items():
        yield Text(f"{names[run]}: not paired with {next(iter(names.values()))}: {why}", "yellow")
    if evaluation.differences:
        table = Table("run", "scorer", "completions", "difference", "95 % interval", "prompts")
        table.title, table.title_justify = f"{evaluation.stage}: against {next(iter(names.values()))}", "left"
        for each in evaluation.differences:
            interval = f"{each.low:+.3f} to {each.high:+.3f}"
            table.add_row(
                names[each.run], each.scorer, each.completions, f"{each.value:+.3f}", interval, str(each.prompts)
            )
        yield table
    for title, changes in (("worse", evaluation.worse), ("better", evaluation.better)):
        if changes:
            yield _samples(f"{evaluation.stage}: scored {title}", changes, names)


def _samples(title: str, changes: Sequence[SampleChange], names: dict[str, str]) -> Table:
    table = Table("run", "score", "prompt", "before", "after", title=title, title_justify="left")
    for each in changes:
        score = f"{number(each.score_before)} → {number(each.score_after)}"
        texts = (shortened(one_line(text), _SHOWN) for text in (each.prompt, each.before, each.after))
        table.add_row(names[each.run], score, *texts)
    return table


def _differing(metrics: Sequence[MetricRow]) -> list[list[str]]:
    return [
        [row.stage, row.metric, *map(_value, row.values)]
        for row in metrics
        if any(value != row.values[0] for value in row.values)
    ]


def _table(title: str, columns: Sequence[str], names: dict[str, str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for name in names.values():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else shortened(one_line(str(value)), _SHOWN)


def _time(outcome: str | None, seconds: float | None, device_seconds: float | None) -> str:
    if seconds is None or device_seconds is None:
        return outcome or "–"
    return f"{duration(seconds)}, {device_seconds:.0f} ({outcome})"
