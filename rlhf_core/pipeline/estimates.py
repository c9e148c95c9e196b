"""Estimates of a stage before it runs, as far as known: rows, tokens, steps, time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.config.prices import PricesConfig
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.config.stages.base_model import BaseModelConfig
from rlhf_core.data.formats import format_of
from rlhf_core.errors import StageError
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.expectations import Expectation, History, Range, Work
from rlhf_core.pipeline.memory import Memory, Shape, memory
from rlhf_core.pipeline.shapes import ShapeUnknownError, shape_of
from rlhf_core.preflight.lengths import tokenizer_of
from rlhf_core.preflight.look import Seen
from rlhf_core.preflight.model import BaseModel

_MODELS = (Kind.BASE_MODEL, Kind.POLICY, Kind.REWARD_MODEL)
_TOKENISED_ROWS = 200  # of each dataset, for the mean number of tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    rows: int | None = None
    tokens: int | None = None  # of all epochs, trained or not
    steps: int | None = None  # of an optimizer, or of rollout and update
    time: Range | None = None  # seconds; None: no result of the store is of such a stage
    money: Range | None = None
    memory: Memory = field(default_factory=Memory)
    unknown_memory: str = ""  # why the memory is not known
    reserves: Reservation = field(default_factory=Reservation)
    groups: Mapping[str, Reservation] = field(default_factory=dict)  # parts of it by name

    @property
    def has_values(self) -> bool:
        return self != Estimate()


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about the inputs that need no run."""

    seen: Seen
    root: Path
    finished: Mapping[str, Manifest]  # results in the store, by node
    earlier: Iterable[Manifest]  # all results of the store
    resumes_after: Mapping[str, int] = field(default_factory=dict)  # steps of checkpoints, by node
    prices: PricesConfig | None = None
    repository: ArtifactRepository | None = None  # of the results


def estimates(graph: Mapping[str, Node], facts: Known) -> dict[str, Estimate]:
    """Return the estimate of each node that will be computed; unknown values are None."""
    estimator = _Estimator(graph, facts)
    return {name: estimator.of(node) for name, node in graph.items() if name not in facts.finished}


class _Estimator:
    def __init__(self, graph: Mapping[str, Node], facts: Known) -> None:
        self._graph = graph
        self._facts = facts
        self._history = History(facts.earlier)
        self._shapes_of_bases: dict[str, tuple[Shape | None, str]] = {}  # or why it is unknown
        self._means: dict[tuple[str, BaseModel], float | None] = {}

    def of(self, node: Node) -> Estimate:
        rows = self._rows(node.inputs.get("dataset", node.name))
        steps = node.config.num_steps(rows)
        shape = self._shape(node)
        tokens = self._tokens(node, rows)
        expected = self._expected(node, shape, tokens, steps)
        return Estimate(
            rows=rows,
            tokens=tokens,
            steps=steps,
            time=None if expected is None else expected.seconds,
            money=None if expected is None else expected.money,
            memory=Memory() if shape is None else memory(node.config, shape, self._shapes(node)),
            unknown_memory=self._unknown(node),
            reserves=node.config.reserves(),
            groups=node.config.reservations(),
        )

    def _rows(self, name: str) -> int | None:
        """Return the rows of the dataset that the node `name` makes."""
        result = self._facts.finished.get(name)
        if result is not None:
            rows = result.metrics.get("rows")
            return rows if isinstance(rows, int) else None
        return self._facts.seen.rows.get(name.removeprefix("data.")) if name.startswith("data.") else None

    def _tokens(self, node: Node, rows: int | None) -> int | None:
        model = self._facts.seen.models.get(node.name)
        read = None if rows is None else node.config.rows_read(rows)
        if model is None or read is None:
            return None
        mean = self._mean_tokens(node.inputs["dataset"].removeprefix("data."), model, node.config)
        return None if mean is None else round(mean * read)

    def _mean_tokens(self, dataset: str, model: BaseModel, reader: StageConfig) -> float | None:
        if (dataset, model) not in self._means:  # about the same, whichever stage reads it
            self._means[dataset, model] = self._measured(dataset, model, reader)
        return self._means[dataset, model]

    def _measured(self, dataset: str, model: BaseModel, reader: StageConfig) -> float | None:
        sample = self._facts.seen.samples.get(dataset)
        if sample is None or not sample.rows:
            return None
        every = max(1, len(sample.rows) // _TOKENISED_ROWS)
        data_format, counts = format_of(sample.format), []
        try:
            tokenizer = tokenizer_of(model, self._facts.root)
            for _, row in sample.rows[::every][:_TOKENISED_ROWS]:
                counts.append(data_format.all_tokens(tokenizer, reader.as_read(row)))
        except StageError:
            return None  # preflight has reported the problem
        return sum(counts) / len(counts)

    def _expected(self, node: Node, shape: Shape | None, tokens: int | None, steps: int | None) -> Expectation | None:
        after = self._facts.resumes_after.get(node.name, 0)
        left = 1.0 if not steps else max(0, steps - after) / steps
        work = Work(
            parameters=None if shape is None else shape.parameters,
            reserved=node.stage.reserves(node.config),
            tokens=None if tokens is None else tokens * left,
            steps=None if steps is None else steps * left,
        )
        return self._history.expect(node.stage.name, work, self._facts.prices)

    def _shapes(self, node: Node) -> dict[str, Shape]:
        """Return the shapes in the form that `memory` takes."""
        starts = {held.start for together in node.config.held_models() for held in together}
        shapes = {start: self._shape(self._graph[node.inputs[start]]) for start in starts}
        return {start: shape for start, shape in shapes.items() if shape is not None}

    def _shape(self, node: Node) -> Shape | None:
        """Return the shape of the model that `node` starts from; None if it has none, or if that is unknown."""
        base = self._base(node)
        return None if base is None else self._shape_of_base(base)[0]

    def _unknown(self, node: Node) -> str:
        """Return why the memory of a node is unknown; empty if it is known, or if the node holds no model."""
        base = self._base(node)
        holds = node.config.engines is not None or any(node.config.held_models())
        return self._shape_of_base(base)[1] if base is not None and holds else ""

    def _base(self, node: Node) -> Node | None:
        """Return the first node of the line of models that `node` reads, or is."""
        while (start := node.inputs.get("model")) is not None:
            node = self._graph[start]
        result = self._facts.finished.get(node.name)
        is_model = isinstance(node.config, BaseModelConfig) or (result is not None and result.kind in _MODELS)
        return node if is_model else None

    def _shape_of_base(self, base: Node) -> tuple[Shape | None, str]:
        if base.name not in self._shapes_of_bases:
            try:
                result = self._facts.finished.get(base.name)
                shape = shape_of(base, self._facts.root, result, self._facts.repository)
                self._shapes_of_bases[base.name] = shape, ""
            except ShapeUnknownError as error:
                self._shapes_of_bases[base.name] = None, str(error)
        return self._shapes_of_bases[base.name]
