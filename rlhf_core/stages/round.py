"""The end of a round: comparison of the candidate with the accepted model. Imports no torch.

Its artifact is the round's record: its inputs are both models, both evaluations and the round's prompts.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind
from rlhf_core.config.stages.loop import RoundConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.errors import StageError
from rlhf_core.evaluation.verdict import Criterion, Verdict, judge


def run(config: RoundConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Accept the candidate if it is at least as good. Raises StageError if the two evaluations cannot be compared."""
    gate = config.gate
    criterion = Criterion("difference", gate.scorer, gate.completions, -gate.margin, strict=False)
    try:
        verdict = Verdict([judge(inputs["accepted_evaluation"], inputs["candidate_evaluation"], criterion)])
    except ValueError as error:
        raise StageError(f"{context.name}: {error}") from error
    folder = context.workdir / "round"
    verdict.write(folder)
    return Output(Kind.ROUND, folder, verdict.metrics())
