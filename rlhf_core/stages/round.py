"""The end of a round: comparison of the candidate with the accepted model. Imports no torch.

Its artifact is the round's record: its inputs are both models, both evaluations and the round's prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlhf_core.artifacts.manifest import Kind, MetricValue
from rlhf_core.config.stages.loop import RoundConfig
from rlhf_core.contract import Input, Output, StageContext
from rlhf_core.errors import StageError
from rlhf_core.evaluation.comparison import compare
from rlhf_core.tracking.protocol import SAMPLES_FILE, read_jsonl


def run(config: RoundConfig, inputs: Mapping[str, Input], context: StageContext) -> Output:
    """Accept the candidate if it is at least as good. Raises StageError if the two evaluations cannot be compared."""
    gate = config.gate
    before, after = (
        read_jsonl(inputs[f"{model}_evaluation"].folder / SAMPLES_FILE) for model in ("accepted", "candidate")
    )
    scorer = gate.scorer or next(iter(before[0]["completions"][0]["scores"]))
    try:
        difference = compare(before, after, scorer, gate.completions)
    except ValueError as error:
        raise StageError(f"{context.name}: {error}") from error
    accepted = difference.low >= -gate.margin
    reason = (
        f"{scorer}, {gate.completions}: {difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f}) on "
        f"{len(before)} prompts; the lower end is {'at least' if accepted else 'below'} {-gate.margin:+.3f}"
    )
    folder = context.workdir / "round"
    folder.mkdir()
    (folder / "verdict.json").write_text(json.dumps({"accepted": accepted, "reason": reason}, indent=1) + "\n")
    metrics: dict[str, MetricValue] = {
        "accepted": int(accepted), "difference": difference.value,
        "difference_low": difference.low, "difference_high": difference.high, "reason": reason,
    }  # fmt: skip
    return Output(Kind.ROUND, folder, metrics)
