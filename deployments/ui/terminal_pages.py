"""The pages of `alignment browse`: what each shows of a run, as text and rows that open further pages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from rich.console import JustifyMethod

from deployments.ui.reading import NotFoundError, StoreReader
from rlhf_core.artifacts.logged_rollouts import LoggedCompletion, LoggedGroup
from rlhf_core.errors import shortened
from rlhf_core.pipeline.run_view import Run
from rlhf_core.report.charts import grouped
from rlhf_core.report.formatting import compared_metrics, duration, main_metrics, number, visible, with_interval
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.rollouts import (
    best_first,
    exponential,
    last_message,
    lowest_first,
    mean_advantage,
    rewards_of,
    tokens_of,
)

_BARS = "▁▂▃▄▅▆▇█"
_BARS_IN_ROW, _BARS_IN_TEXT = 32, 72
_LONGEST_CELL = 300  # characters
_MOST_METRICS = 6  # in the list of logged steps
_STYLES = {"failed": "red", "running": "cyan", "waiting": "dim", "not run": "dim"}
_TOKEN_COLUMNS = ("advantage", "engine", "trainer", "ratio", "entropy", "reference", "value", "step reward")


@dataclass(frozen=True, slots=True)
class Row:
    """cells: text as it is stored, of which the terminal gets nothing unescaped. opens: makes the row's page."""

    cells: tuple[str, ...]
    opens: Callable[[], Page] | None = None
    style: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """title: its part of the path. text: above the rows. changes: whether the store may soon have more of it."""

    title: str
    columns: Sequence[tuple[str, JustifyMethod]]
    rows: Sequence[Row]
    text: str = ""
    changes: bool = False


def run_page(reader: StoreReader, run_id: str) -> Page:
    """Return a run's stages. Raises NotFoundError if the store has no such run, IntegrityError if it is damaged."""
    run = reader.known_run(run_id)
    took = "" if run.seconds is None else f", {duration(run.seconds)}"
    rows = [
        Row(
            (node.name, node.state, _time(node), _summary(node)),
            partial(node_page, reader, run, node.name),
            _STYLES.get(node.state, ""),
        )
        for node in reader.nodes(run)
    ]
    return Page(
        run.name,
        [*_left("stage", "state"), *_right("time"), *_left("metrics")],
        rows,
        f"run {run.run_id}, {run.outcome}, started {run.started_at:%Y-%m-%d %H:%M} UTC{took}\n"
        + " ".join(run.overrides),
        changes=run.record is None,
    )


def node_page(reader: StoreReader, run: Run, name: str) -> Page:
    """Return a stage's metrics over its steps, those of one question beside each other, and its logged steps."""
    node = reader.node(run, name)
    if node is None:
        raise NotFoundError(f"the run {run.run_id} has no stage {name}")
    curves = grouped(reader.curves(node))
    rows = []
    if steps := reader.logged_steps(node):
        shown = f"logged steps: {len(steps)}"
        rows.append(
            Row(("rollouts", shown, *map(str, (steps[0], steps[-1])), "", ""), partial(steps_page, reader, node))
        )
    for group in curves.charts.values():
        for metric, points in group.items():
            values = [value for _, value in points]
            numbers = (number(each) for each in (values[0], values[-1], min(values), max(values)))
            cells = (metric, sparkline(values, _BARS_IN_ROW), *numbers)
            rows.append(Row(cells, partial(metric_page, reader, node, metric, points)))
    rows += [Row((metric, "", *[number(value)] * 4), style="dim") for metric, value in sorted(curves.constants.items())]
    metrics = {} if node.manifest is None else node.manifest.metrics
    results = [f"{metric} {with_interval(metrics, metric)}" for metric in compared_metrics({name: metrics})]
    state = " ".join(filter(None, (node.state, _time(node), node.holder and f"by {node.holder}")))
    return Page(
        name,
        [*_left("metric", "over the steps"), *_right("first", "last", "least", "most")],
        rows,
        "\n".join(filter(None, (f"{node.ref.full}: {state}", node.error, ", ".join(results)))),
        changes=node.state == "running",
    )


def metric_page(reader: StoreReader, node: NodeView, metric: str, points: Sequence[tuple[float, float]]) -> Page:
    """Return a metric's value at each step, whose rows open the logged rollouts nearest to it."""
    rows = [
        Row((number(float(step + 1)), number(value)), partial(step_page, reader, node, int(step) + 1))
        for step, value in points
    ]
    values = [value for _, value in points]
    return Page(metric, _right("step", metric), rows, sparkline(values, _BARS_IN_TEXT))


def steps_page(reader: StoreReader, node: NodeView) -> Page:
    """Return the steps of which rollouts are logged, with the first metrics of each."""
    charts = grouped(reader.curves(node)).charts
    curves = {name: dict(points) for group in charts.values() for name, points in group.items()}
    shown = dict(list(curves.items())[:_MOST_METRICS])
    rows = [
        Row(
            (str(step), *(_number(points.get(step - 1)) for points in shown.values())),
            partial(step_page, reader, node, step),
        )
        for step in reader.logged_steps(node)
    ]
    return Page("rollouts", _right("step", *shown), rows)


def step_page(reader: StoreReader, node: NodeView, asked: int) -> Page:
    """Return the logged prompts of a step, or of the nearest before it, those with a low reward first."""
    _, step = reader.nearest_step(node, asked)
    rows = []
    for index, group in lowest_first(step.groups):
        rewards = rewards_of(group)
        cells = (
            str(index + 1), number(fmean(rewards)) if rewards else "–",
            " ".join(_number(each.reward) for each in group.completions),
            shortened(group.answer or "", _LONGEST_CELL), shortened(last_message(group), _LONGEST_CELL),
        )  # fmt: skip
        rows.append(Row(cells, partial(group_page, index, group)))
    nearest = "" if step.step == asked else f"step {asked} is not logged: this is the nearest\n"
    counts = f"{step.prompts} prompts, {step.completions} completions; {len(rows)} prompts are logged, the lowest first"
    return Page(
        f"step {step.step}",
        [*_right("prompt", "mean"), *_left("rewards", "answer", "last message")],
        rows,
        nearest + counts,
    )


def group_page(index: int, group: LoggedGroup) -> Page:
    """Return the completions of a prompt, the highest advantage first."""
    names = list(dict.fromkeys(name for each in group.completions for name in each.rewards))
    rows = [
        Row(
            (
                str(number_of + 1), _number(completion.reward),
                *(_number(completion.rewards.get(name)) for name in names),
                number(mean_advantage(completion)), str(completion.sampled_tokens), str(completion.turns),
                completion.finish_reason, ", ".join(str(version) for _, version in completion.versions),
                shortened(completion.text, _LONGEST_CELL),
            ),
            partial(completion_page, number_of, group, completion),
        )
        for number_of, completion in best_first(group)
    ]  # fmt: skip
    numbers = _right("completion", "reward", *names, "advantage", "tokens", "turns")
    columns = [*numbers, *_left("ended by", "weights", "text")]
    return Page(f"prompt {index + 1}", columns, rows, _conversation(group.prompt) + _answer(group))


def completion_page(number_of: int, group: LoggedGroup, completion: LoggedCompletion) -> Page:
    """Return a completion's conversation, and every token with what it was trained on."""
    sequences = [tokens_of(sequence) for sequence in completion.sequences]
    for token in (token for tokens in sequences for token in tokens if "trainer" in token):
        trainer, engine = token["trainer"], token["engine"]
        token["ratio"] = None if trainer is None or engine is None else exponential(trainer - engine)
    known = [name for name in _TOKEN_COLUMNS if any(name in token for tokens in sequences for token in tokens)]
    rows = [
        Row(
            (
                *([str(of)] if len(sequences) > 1 else []), str(place), token["text"], str(token["id"]),
                *(_number(token.get(name)) if name in token else "" for name in known),
            ),
            style="" if "engine" in token else "dim",
        )
        for of, tokens in enumerate(sequences, 1)
        for place, token in enumerate(tokens, 1)
    ]  # fmt: skip
    of_which = _right("sequence") if len(sequences) > 1 else []
    columns = [*of_which, *_right("#"), *_left("token"), *_right("id", *known)]
    total = {"reward": completion.reward, "advantage": mean_advantage(completion)}
    named = [*total.items(), *completion.rewards.items(), *completion.environment.items()]
    head = ", ".join(f"{name} {_number(value)}" for name, value in named)
    turns = "1 turn" if completion.turns == 1 else f"{completion.turns} turns"
    length = f"{completion.sampled_tokens} tokens in {turns}, ended by {completion.finish_reason}"
    conversation = _conversation(completion.messages or group.prompt)
    return Page(
        f"completion {number_of + 1}", columns, rows,
        f"{head}; {length}\n\n{conversation}assistant:\n{visible(completion.text)}\n{_answer(group)}\n"
        "tokens with the log-probs of the engine, the trainer and the reference; dimmed ones are not trained",
    )  # fmt: skip


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve as a line of at most `width` bars, each the mean of its part of the values."""
    bars = min(width, len(values))
    cuts = [len(values) * bar // bars for bar in range(bars + 1)]
    means = [fmean(values[start:end]) for start, end in itertools.pairwise(cuts)]
    low, reach = min(means), max(means) - min(means)
    return "".join(_BARS[round((mean - low) / reach * (len(_BARS) - 1)) if reach else 0] for mean in means)


def _left(*names: str) -> list[tuple[str, JustifyMethod]]:
    return [(name, "left") for name in names]


def _right(*names: str) -> list[tuple[str, JustifyMethod]]:
    return [(name, "right") for name in names]


def _time(node: NodeView) -> str:
    return "" if node.seconds is None else duration(node.seconds)


def _summary(node: NodeView) -> str:
    return node.error or (main_metrics(node.manifest.metrics) if node.manifest is not None else node.holder)


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)


def _conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
        calls = json.dumps(message["tool_calls"], indent=1, ensure_ascii=False) if message.get("tool_calls") else ""
        lines += filter(None, (f"{message.get('role', '')}:", text, calls))
    return "".join(f"{line}\n" for line in lines)


def _answer(group: LoggedGroup) -> str:
    return "" if group.answer is None else f"answer: {group.answer}\n"
