"""The stage `gate` before anything runs: whether the evaluations have the scores that it compares."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.stages.gate import ModelGateConfig
from rlhf_core.graph.drafting import Draft
from rlhf_core.graph.evaluations import score_problem
from rlhf_core.preflight.stages.context import CheckContext


def check(config: ModelGateConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    for group, metrics in (("better", config.better), ("not_worse", config.not_worse)):
        for name, metric in metrics.items():
            place = f"{node.section}.{group}.{name}"
            scorer = metric.scorer or name
            problem = score_problem(context.recipe, place, metric.evaluation, scorer, metric.completions)
            yield from () if problem is None else (problem,)
