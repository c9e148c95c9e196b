"""A gate: comparison of a candidate with the model that it is to replace, metric by metric. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.gate import ModelGateConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.errors import StageError
from rlhf_core.evaluation.verdict import Comparison, Criterion, Verdict, judge


def run(config: ModelGateConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Write the verdict. Raises StageError if two evaluations cannot be compared."""
    comparisons: list[Comparison] = []
    for place, criterion in _criteria(config):
        baseline, candidate = (inputs[f"{place}.evaluation.{model}"] for model in ("baseline", "candidate"))
        try:
            comparisons.append(judge(baseline, candidate, criterion))
        except ValueError as error:
            raise StageError(f"{context.name}.{place}: {error}") from error
    verdict = Verdict(comparisons)
    folder = context.workdir / "gate"
    verdict.write(folder)
    return Output(Kind.GATE, folder, verdict.metrics())


def _criteria(config: ModelGateConfig) -> Iterator[tuple[str, Criterion]]:
    """Yield each criterion with the place of its settings."""
    for name, better in config.better.items():
        yield f"better.{name}", Criterion(name, better.scorer or name, better.completions, better.by, strict=True)
    for name, guarded in config.not_worse.items():
        criterion = Criterion(name, guarded.scorer or name, guarded.completions, -guarded.than, strict=False)
        yield f"not_worse.{name}", criterion
