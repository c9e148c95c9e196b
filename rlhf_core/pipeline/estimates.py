"""Estimates of a stage before it runs, as far as known: rows, tokens, steps, time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.chat.tokenizers import vocabulary
from rlhf_core.config.engines.placement import Reservation
from rlhf_core.config.prices import PricesConfig
from rlhf_core.config.stages.base import StageConfig
from rlhf_core.config.stages.base_model import BaseModelConfig, FolderModel, ScratchModel
from rlhf_core.data.formats import format_of
from rlhf_core.errors import StageError
from rlhf_core.graph.graph import Node
from rlhf_core.models.folders.folder import read_config
from rlhf_core.models.folders.headers import stored_tensors
from rlhf_core.models.folders.scratch import architecture
from rlhf_core.pipeline.expectations import Expectation, History, Range, Work
from rlhf_core.pipeline.memory import Memory, Shape, memory
from rlhf_core.preflight.lengths import tokenizer_of
from rlhf_core.preflight.look import Seen
from rlhf_core.preflight.model import BaseModel

_TOKENISED_ROWS = 200  # of each dataset, for the mean number of tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    rows: int | None = None
    tokens: int | None = None  # of all epochs, trained or not
    steps: int | None = None  # of an optimizer, or of rollout and update
    time: Range | None = None  # seconds; None: no result of the store is of such a stage
    money: Range | None = None
    memory: Memory = field(default_factory=Memory)
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


def estimates(graph: Mapping[str, Node], facts: Known) -> dict[str, Estimate]:
    """Return the estimate of each node that will be computed; unknown values are None."""
    estimator = _Estimator(graph, facts)
    return {name: estimator.of(node) for name, node in graph.items() if name not in facts.finished}


class _Estimator:
    def __init__(self, graph: Mapping[str, Node], facts: Known) -> None:
        self._graph = graph
        self._facts = facts
        self._history = History(facts.earlier)
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
                counts.append(data_format.num_tokens(tokenizer, reader.as_read(row)))
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
        while (start := node.inputs.get("model")) is not None:
            node = self._graph[start]
        model, result = self._facts.seen.models.get(node.name), self._facts.finished.get(node.name)
        counted = result.metrics.get("parameters") if result is not None else None
        if model is None:
            return None
        return _shape(model.config, self._facts.root, counted if isinstance(counted, int) else None)


def _shape(config: BaseModelConfig, root: Path, parameters: int | None) -> Shape | None:
    match config.source:
        case ScratchModel() as source:
            return Shape.of(
                {**architecture(source), "vocab_size": len(vocabulary(source.words, images=source.vision is not None))},
                parameters,
            )
        case FolderModel(path=path) if "://" not in path:
            folder = root / path
            try:
                return Shape.of(read_config(folder), parameters or _stored_parameters(folder))
            except StageError:
                return None  # preflight has reported the problem
        case _:
            return None


def _stored_parameters(folder: Path) -> int:
    return sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values())
