"""Input and output of a side of the benchmarks against TRL. Importing this loads no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

from benchmarks.word_models import SHAPES, Shape

COMPILED = "ours-compiled"  # the side that is ours with `engine.compiled`, and in RL `rollout.compiled`
SELECTIVE = "ours-selective"  # with `engine.gradient_checkpointing: selective`


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one process; each benchmark adds its own settings, all of them whole numbers."""

    size: str  # of SHAPES
    dtype: Literal["float32", "bfloat16"]
    warm_up: int = field(default=2, kw_only=True)  # steps that are not counted
    steps: int = field(default=5, kw_only=True)  # that are
    threads: int = field(default=2, kw_only=True)  # of every process that computes; no two of them do so at a time

    @property
    def shape(self) -> Shape:
        return SHAPES[self.size]

    @property
    def all_steps(self) -> int:
        return self.warm_up + self.steps

    def check(self) -> None:
        """Raise ValueError if the sides could not do the same work."""
        if self.warm_up < 1 or self.steps < 1:
            raise ValueError(f"{self.warm_up} steps of warm-up and {self.steps} counted: at least one of both")

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class Step:
    """One counted optimizer step."""

    seconds: float
    amount: float  # the benchmark's unit: tokens, or pairs
    phases: dict[str, float] = field(default_factory=dict)  # seconds of its parts


@dataclass(frozen=True, slots=True)
class Result:
    """The measurement of one side in one process."""

    began: float  # the counted steps, on the clock `time.perf_counter`
    steps: list[Step]
    versions: dict[str, str]
    consumed: dict[str, int] = field(default_factory=dict)  # of the whole run, as the side itself has counted it
    losses: list[float] = field(default_factory=list)  # of the whole run

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Result:
        read = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**read, "steps": [Step(**step) for step in read["steps"]]})


def measured(
    workload: Workload,
    ended: Sequence[float],
    amounts: Sequence[float],
    versions: dict[str, str],
    *,
    phases: Sequence[Mapping[str, float]] = (),
    consumed: dict[str, int] | None = None,
    losses: Sequence[float] = (),
) -> Result:
    """Return the result. ended: the end of each step of the run; a step lasts from the end of the one before. amounts
    and phases: of each step; `other`, the rest of its time, is added to its phases.

    Raises RuntimeError if the run had another number of steps.
    """
    if len(ended) != workload.all_steps:
        raise RuntimeError(f"{len(ended)} steps instead of {workload.all_steps}: not the same work")
    steps = []
    for i in range(workload.warm_up, len(ended)):
        seconds, parts = ended[i] - ended[i - 1], dict(phases[i]) if phases else {}
        steps.append(Step(seconds, amounts[i], parts and {**parts, "other": seconds - sum(parts.values())}))
    return Result(ended[workload.warm_up - 1], steps, versions, consumed or {}, list(losses))


def answer(arguments: Sequence[str], workload: type[Workload], run: Callable[..., Result]) -> None:
    """Run the main program of a side: WORKLOAD MODEL RESULT SIDE."""
    file, model, result, side = arguments
    run(workload.read(Path(file)), Path(model), side).write(Path(result))
