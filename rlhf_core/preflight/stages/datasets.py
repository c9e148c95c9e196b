"""Checks of the stage `overlap`: whether the readable rows have held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.data.dataset import OverlapConfig
from rlhf_core.data.formats import Rows, format_of
from rlhf_core.data.overlap import overlap_problem
from rlhf_core.graph.drafting import Draft
from rlhf_core.preflight.samples import is_used_whole
from rlhf_core.preflight.stages.context import CheckContext


def overlap(config: OverlapConfig, node: Draft, context: CheckContext) -> Iterator[str]:
    recipe, name = context.recipe, config.dataset
    if name not in context.samples:
        return  # a dataset that exists already, which its job reads
    problem = overlap_problem(
        context.samples[name],
        format_of(recipe.data[name].format),
        {other: _rows(other, context) for other in config.held_out if is_used_whole(recipe, other)},
        {other: _rows(other, context) for other in recipe.data[name].exclude if other in context.samples},
    )
    if problem is not None:
        yield f"data.{name}: {problem}"


def _rows(name: str, context: CheckContext) -> Rows:
    read = context.samples.get(name, [])
    return Rows(format_of(context.recipe.data[name].format), [row for _, row in read])
