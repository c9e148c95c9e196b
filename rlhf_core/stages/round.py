"""The end of a round: comparison of the candidate with the accepted model. Imports no torch.

Its artifact is the round's record: its inputs are both models, both evaluations and the round's prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.loop import RoundConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.errors import StageError
from rlhf_core.evaluation.verdict import Criterion, Verdict, judge


def run(config: RoundConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Accept the candidate if it is at least as good. Raises StageError if two evaluations cannot be compared."""
    gate, candidate = config.gate, inputs["candidate_evaluation"]
    bounds = {"accepted_evaluation": Criterion("difference", gate.scorer, gate.completions, -gate.margin, strict=False)}
    if gate.start_margin is not None:
        bounds["start_evaluation"] = replace(
            bounds["accepted_evaluation"], metric="difference_to_start", bound=-gate.start_margin
        )
    try:
        comparisons = {name: judge(inputs[name], candidate, criterion) for name, criterion in bounds.items()}
    except ValueError as error:
        raise StageError(f"{context.name}: {error}") from error
    if to_start := comparisons.get("start_evaluation"):
        comparisons["start_evaluation"] = replace(to_start, reason=f"against the loop's start, {to_start.reason}")
    verdict = Verdict([*comparisons.values()])
    folder = context.workdir / "round"
    verdict.write(folder)
    return Output(Kind.ROUND, folder, verdict.metrics())
