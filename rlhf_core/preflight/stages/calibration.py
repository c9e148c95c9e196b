"""The stage `calibration` before anything runs: its rubric, and the verdicts of people."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.stages.calibration import CalibrationConfig
from rlhf_core.errors import RewardError
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.rubrics import rubric_problems
from rlhf_core.preflight.stages.context import CheckContext
from rlhf_core.rewards.criteria import criteria_of_row, read_rubric
from rlhf_core.rewards.people import completion_of, verdicts_of


def check(config: CalibrationConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    rows, rubric = context.samples.get(config.dataset, []), config.reward
    problems = list(rubric_problems(rubric, rows, f"{node.section}.reward", context.root))
    if problems:
        yield from problems
        return
    shared = () if rubric.path is None else read_rubric(context.root / rubric.path)
    for where, row in rows:
        criteria = shared if rubric.column is None else (*shared, *criteria_of_row(row, rubric.column))
        try:
            completion_of(row, config.completion)
            verdicts_of(row, config.verdicts, criteria)
        except RewardError as error:
            yield f"{node.section}.dataset: {where}: {error}"
            return
