"""The pages: what each shows of the store, rendered by its template."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from deployments.ui.dataset_page import MOST_ROWS, read_dataset_view, read_datasets
from deployments.ui.loops import read_last_rounds, read_loop
from deployments.ui.reading import NotFoundError, StoreReader
from deployments.ui.registry import ACTIONS, Form, aliases_of, move, read_model, summaries
from deployments.ui.run_list import RunsView
from deployments.ui.services import read_services
from rlhf_core.artifacts.attempts import attempts_at
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.logged_rollouts import LoggedCompletion, LoggedStep
from rlhf_core.artifacts.manifest import ArtifactRef, Kind
from rlhf_core.artifacts.resources import read_uses
from rlhf_core.config.texts import is_model_name
from rlhf_core.errors import StoreError, shortened
from rlhf_core.pipeline.compared_runs import read_compared_run
from rlhf_core.pipeline.run_view import Run, run_part
from rlhf_core.report.charts import Chart, curve_charts, grouped, histogram_charts
from rlhf_core.report.content import Curves
from rlhf_core.report.formatting import main_metrics, money
from rlhf_core.report.node_view import NodeView
from rlhf_core.report.resource_charts import resource_charts
from rlhf_core.report.rollouts import (
    completion_view,
    last_message,
    lowest_first,
    lowest_reward_first,
    mean_advantage,
    mean_ratio,
    reward_sum,
    shade,
)
from rlhf_core.report.run_diff import diff_runs, own_costs
from rlhf_core.report.run_part import run_context
from rlhf_core.report.sections import StageSection, stage_section
from rlhf_core.report.templating import environment, quoted
from tasks.followers import follows

_MOST_RUNS = 200  # or datasets, of a page
_MOST_COMPARED = 6
_LONGEST_NUMBER = 15  # digits
_SAMPLES = 5  # prompts of a compared run whose scores changed most, each way

Where = Mapping[str, str]  # the parts of a page's path, by name
Query = Mapping[str, str]
Makers = Mapping[ArtifactRef, tuple[Run, str]]  # of artifacts: a run, and the stage of it


class Pages:
    def __init__(self, reader: StoreReader):
        self._reader = reader
        self._templates = environment("deployments.ui")

    def error(self, text: str) -> str:
        return self._rendered("error.html", title="Error", text=text)

    def runs(self, where: Where, query: Query) -> str:
        """The runs of the store, filtered and sorted as the address says (`RunsView`)."""
        view, all_runs = RunsView.of(query), self._reader.runs()
        runs = view.of_runs(all_runs)
        return self._rendered(
            "runs.html", title="Runs", runs=runs[:_MOST_RUNS], count=len(runs), view=view,
            tags=sorted({tag for run in all_runs for tag in run.tags}),
            outcomes=("succeeded", "failed", "stopped", "unfinished"), headline=_headline_metric, money=money,
        )  # fmt: skip

    def run(self, where: Where, query: Query) -> str:
        """A run: its result in a sentence, its stages and when they ran, its evaluations, samples, and its curves."""
        run = self._run(where)
        nodes = self._reader.nodes(run)
        costs, inputs = self._reader.costs(run), self._reader.inputs(nodes)
        content, problems = self._reader.content(nodes)
        curves = dict(content.curves if content is not None else {})
        curves |= {node.name: self._reader.curves(node) for node in nodes if node.state == "running"}
        logged = {node.name: steps[-1] for node in nodes if (steps := self._reader.logged_steps(node))}
        part = run_part(self._reader.repository, run, nodes, inputs, costs.stages, curves, logged)
        drawn = [node for node in nodes if node.name in curves]
        model = None if content is None or content.model is None else run.nodes[content.model.node]
        aliases = [] if model is None else aliases_of(self._reader.repository.store, model)
        last = self._section(run, drawn[-1], curves[drawn[-1].name]) if drawn else None
        return self._rendered(
            "run.html", title=run.name, refresh=run.record is None, run=run, content=content, section=last,
            charts=last is not None or bool(part.uses), with_curves=drawn, problems=problems, aliases=aliases,
            retried=self._retried(run, nodes), **run_context(part, partial(_path_of, run)),
        )  # fmt: skip

    def node(self, where: Where, query: Query) -> str:
        """A stage: its curves, whose points open the rollouts of their step, its settings and its inputs.

        Of a dataset also its rows: `rows` of them from the row `from`.
        """
        run, node = self._node(where)
        curves, problem = self._curves(node)
        uses = read_uses(self._reader.repository.store, node.ref)
        data = None
        if node.manifest is not None and node.manifest.kind == Kind.DATASET:
            start, count = _counted(query, "from", 0), _counted(query, "rows", MOST_ROWS)
            data = read_dataset_view(self._reader, run, node, start, min(max(1, count), MOST_ROWS))
        return self._rendered(
            "node.html", title=f"{run.name}: {node.name}", refresh=node.state == "running", run=run, node=node,
            section=self._section(run, node, curves), problem=problem, charts=True, here=_path_of(run, node.name),
            data=data, most_rows=MOST_ROWS, place=partial(_path_of, run), resources=resource_charts(uses),
            attempts=len(uses),
        )  # fmt: skip

    def step(self, where: Where, query: Query) -> str:
        """The logged prompts of a step, or of the nearest logged step before it; those with a low reward first.

        `histogram`, `low` and `high` in the query leave the completions within a bar.
        """
        run, node, steps, step = self._step(where)
        groups = lowest_first(step.groups)
        chosen = _within(step, query) if "histogram" in query else None
        before = [each for each in steps if each < step.step]
        after = [each for each in steps if each > step.step]
        return self._rendered(
            "step.html", title=f"{node.name}, step {step.step}", run=run, node=node, step=step, groups=groups,
            charts=histogram_charts(step.histograms), chosen=chosen, query=query,
            before=before[-1] if before else None, after=after[0] if after else None, asked=int(where["step"]),
            here=f"{_path_of(run, node.name)}/steps/{step.step}", asked_of=last_message,
            shade=shade, completions_of=lowest_reward_first,
        )  # fmt: skip

    def group(self, where: Where, query: Query) -> str:
        """The completions of a prompt side by side; those with a low reward first."""
        run, node, _, step = self._step(where)
        index, group = _indexed(step.groups, where["group"], "prompt")
        completions = lowest_reward_first(group)
        return self._rendered(
            "group.html", title=f"{node.name}, step {step.step}, prompt {index + 1}", run=run, node=node, step=step,
            index=index, group=group, completions=completions, mean_advantage=mean_advantage, shade=shade,
            reward_sum=reward_sum,
        )  # fmt: skip

    def completion(self, where: Where, query: Query) -> str:
        """A completion: its conversation, and every token with what it was trained on."""
        run, node, _, step = self._step(where)
        index, group = _indexed(step.groups, where["group"], "prompt")
        number_of, _ = _indexed(group.completions, where["completion"], "completion")
        return self._rendered(
            "completion.html", title=f"{node.name}, step {step.step}, prompt {index + 1}, completion {number_of + 1}",
            run=run, node=node, step=step, index=index, group=group, number_of=number_of,
            completion=completion_view(group, number_of),
        )  # fmt: skip

    def image(self, where: Where) -> bytes:
        _, node = self._node(where)
        data = self._reader.image(node, where["sha256"])
        if data is None:
            raise NotFoundError(f"{node.name} has no such image")
        return data

    def compare(self, where: Where, query: Query) -> str:
        """Up to six runs: what differs and by how much, once all have ended, and curves of stages of the same name."""
        asked = list(dict.fromkeys(query.get("run", "").split()))
        runs = [self._run({"run": run_id}) for run_id in asked[:_MOST_COMPARED]]
        names = {run.run_id: f"{run.name} {run.run_id[-8:]}" for run in runs}
        ended = all(run.record is not None for run in runs)
        repository = self._reader.repository
        content, problem = None, "" if ended else "Evaluations and settings are compared when all runs have ended."
        if ended and len(runs) > 1:
            try:
                content = diff_runs([read_compared_run(repository, each, follows) for each in names], samples=None)
            except StoreError as error:
                problem = str(error)
        return self._rendered(
            "compare.html", title="Compare", runs=runs, charts=self._side_by_side(names, runs), content=content,
            samples=_SAMPLES, headline=_headline_metric, names=names, asked=len(asked),
            problem=problem, costs=[] if content is None else own_costs(content.runs),
        )  # fmt: skip

    def _side_by_side(self, names: Mapping[str, str], runs: Sequence[Run]) -> list[Chart]:
        """Return a chart of each metric that changes in one of the runs, with a line for each run that has it."""
        curves: dict[str, dict[str, Curves]] = {}  # stage -> run -> its metrics
        for run in runs:
            for node in self._reader.nodes(run):
                curves.setdefault(node.name, {})[names[run.run_id]], _ = self._curves(node)
        charts: dict[str, Curves] = {}
        for stage, of_runs in curves.items():
            drawn = [group for each in of_runs.values() for group in grouped(each).charts.values()]
            for metric in dict.fromkeys(name for group in drawn for name in group if not name.startswith("seconds/")):
                charts[f"{stage}: {metric}"] = {run: each[metric] for run, each in of_runs.items() if metric in each}
        return curve_charts(charts)

    def models(self, where: Where, query: Query) -> str:
        """The models of the registry: the champion of each, since when, and whether a candidate waits for a person."""
        models = summaries(self._reader.repository.store)
        return self._rendered("models.html", title="Models", models=models, made=_address_in(self._makers()))

    def model(self, where: Where, query: Query, refused: str = "") -> str:
        """A model: its champion, its candidate beside it, and every move. refused: why the last move was not made."""
        model = read_model(self._reader, where["model"])
        if model is None:
            raise NotFoundError(f"the registry has no model {where['model']}")
        makers = self._makers()
        pair = [makers[each.manifest] for each in (model.champion, model.candidate) if each and each.manifest in makers]
        runs = list(dict.fromkeys(run.run_id for run, _ in pair))
        return self._rendered(
            "model.html", title=model.name, model=model, refused=refused, made=_address_in(makers),
            compared=runs if len(runs) > 1 else [],
        )  # fmt: skip

    def move(self, where: Where, form: Form) -> str:
        """Move an alias as the form of a model's page asks. Returns an empty text, or the page that says why not."""
        if where["action"] not in ACTIONS:
            raise NotFoundError(f"there is no `{where['action']}`")
        try:
            move(self._reader.repository.store, where["model"], where["action"], form)
        except (StoreError, ValueError, KeyError) as error:
            refused = str(error) if isinstance(error, StoreError) else "the form is not of this page: load it again"
            return self.model(where, {}, refused)
        return ""

    def data(self, where: Where, query: Query) -> str:
        """The datasets of the store's runs, the newest first, each with a link to its rows."""
        return self._rendered(
            "data.html", title="Data", datasets=read_datasets(self._reader), most=_MOST_RUNS,
            made=_address_in(self._makers()),
        )  # fmt: skip

    def loops(self, where: Where, query: Query) -> str:
        """The loops of the store, each with its last round."""
        return self._rendered("loops.html", title="Loops", loops=read_last_rounds(self._reader), money=money)

    def loop(self, where: Where, query: Query) -> str:
        """A loop: its scores by round and against its start, verdicts with their reasons, and each round's cost."""
        name = where["loop"]
        loop = read_loop(self._reader, name) if is_model_name(name) else None
        if loop is None:
            raise NotFoundError(f"the store has no loop {name}")
        return self._rendered(
            "loop.html", title=loop.name, refresh=loop.rounds[0].ended_at is None, loop=loop,
            charts=[{**chart, "x": "round"} for chart in curve_charts(loop.curves)],
            money=lambda cost: money(cost, loop.prices), made=_address_in(self._makers()),
        )  # fmt: skip

    def services(self, where: Where, query: Query) -> str:
        """Prefect, Ray and the store: where they are, whether they answer, and how to sign in."""
        services = read_services(self._reader.repository.store, os.environ)
        return self._rendered("services.html", title="Services", services=services)

    def _makers(self) -> Makers:
        """Return the first run that had each artifact, with its stage."""
        return {ref: (run, name) for run in self._reader.runs() for name, ref in run.nodes.items()}

    def _run(self, where: Where) -> Run:
        run = self._reader.run(where["run"]) if where["run"].isprintable() and "/" not in where["run"] else None
        if run is None:
            raise NotFoundError(f"the store has no run {where['run']}")
        return run

    def _node(self, where: Where) -> tuple[Run, NodeView]:
        run = self._run(where)
        node = self._reader.node(run, where["node"])
        if node is None:
            raise NotFoundError(f"the run {run.run_id} has no stage {where['node']}")
        return run, node

    def _step(self, where: Where) -> tuple[Run, NodeView, list[int], LoggedStep]:
        """Return the logged step that was asked for, or the nearest one before it, else the first."""
        run, node = self._node(where)
        asked = where["step"]
        if not _is_number(asked):
            raise NotFoundError(f"{shortened(asked, _LONGEST_NUMBER)} is no number of a step")
        return run, node, *self._reader.nearest_step(node, int(asked))

    def _retried(self, run: Run, nodes: Sequence[NodeView]) -> dict[str, list[str]]:
        """Return the stages by what a retry would do with them; empty while the run is at work, or has succeeded."""
        if run.outcome == "succeeded" or any(node.state == "running" for node in nodes):
            return {}
        retried: dict[str, list[str]] = {"computes": [], "resumes": [], "reuses": []}
        for node in nodes:
            if node.manifest is not None:
                retried["reuses"].append(node.name)
            elif step := Checkpoints(self._reader.repository.store, node.ref).newest_step():
                retried["resumes"].append(f"{node.name} after step {step}")
            else:
                retried["computes"].append(node.name)
        return {verb: stages for verb, stages in retried.items() if stages}

    def _curves(self, node: NodeView) -> tuple[Curves, str]:
        """Return the metrics of a stage, or none and why they cannot be read."""
        try:
            return self._reader.curves(node), ""
        except StoreError as error:
            return {}, str(error)

    def _section(self, run: Run, node: NodeView, curves: Curves) -> StageSection:
        here, names = _path_of(run, node.name), {ref: name for name, ref in run.nodes.items()}
        steps = [(step, f"{here}/steps/{step}") for step in self._reader.logged_steps(node)]
        attempts = [] if node.manifest is not None else attempts_at(self._reader.repository.store, node.ref, None)
        return stage_section(node, curves, names, steps, attempts)

    def _rendered(self, template: str, **context: Any) -> str:
        return self._templates.get_template(template).render(**context)


def _headline_metric(run: Run) -> str:
    """Return the main metrics of the last evaluation of a run, else of its last stage that has some."""
    if run.record is None:
        return ""
    nodes = [node for node in run.record.nodes if node.metrics and node.ref.stage != "report"]
    evaluated = [node for node in nodes if node.ref.stage == "evaluation"]
    return main_metrics((evaluated or nodes)[-1].metrics) if nodes else ""


def _within(step: LoggedStep, query: Query) -> list[tuple[int, int, LoggedCompletion]]:
    """Return the logged completions within a bar of a histogram, with the numbers of their prompts and their own."""
    try:
        low, high = float(query["low"]), float(query["high"])
    except (KeyError, ValueError) as error:
        raise NotFoundError("give low and high of the bar as numbers") from error
    values: Mapping[str, Callable[[LoggedCompletion], float | None]] = {
        "reward": lambda each: each.reward, "length": lambda each: each.sampled_tokens, "ratio": mean_ratio,
    }  # fmt: skip
    value_of = values.get(query["histogram"])
    if value_of is None:
        return []
    slack = 1e-4 * max(abs(low), abs(high))  # edges are rounded
    chosen = []
    for g, group in enumerate(step.groups):
        for c, completion in enumerate(group.completions):
            value = value_of(completion)
            if value is not None and low - slack <= value <= high + slack:
                chosen.append((g, c, completion))
    return chosen


def _indexed(items: Sequence[Any], index: str, what: str) -> tuple[int, Any]:
    if not _is_number(index) or int(index) >= len(items):
        raise NotFoundError(
            f"there is no {what} {shortened(index, _LONGEST_NUMBER)}: {len(items)} are logged, counted from 0"
        )
    return int(index), items[int(index)]


def _counted(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    if text and not _is_number(text):
        raise NotFoundError(f"give `{name}` as a number of rows")
    return int(text) if text else default


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _LONGEST_NUMBER


def _address_in(makers: Makers) -> Callable[[ArtifactRef], str]:
    """Return a function that returns the address of an artifact's stage; an empty text if no run had it."""
    return lambda ref: _path_of(*makers[ref]) if ref in makers else ""


def _path_of(run: Run, node: str) -> str:
    return f"/runs/{quoted(run.run_id)}/{quoted(node)}"
