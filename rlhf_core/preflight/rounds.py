"""Preflight checks of a loop's round: its initial model, and whether prompts are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundStart
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import Node
from rlhf_core.graph.round_drafting import PROMPTS
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.stages.round_prompts import out_of_prompts


def check_round(
    recipe: Recipe,
    graph: Mapping[str, Node],
    start: RoundStart,
    rows: Mapping[str, int],
    repository: ArtifactRepository,
) -> Iterator[str]:
    """Return one sentence about the round. rows: maximum rows of each dataset that could be counted.

    Raises RecipeError if fewer prompts are left than a round needs.
    """
    loop = recipe.loop
    assert loop is not None, "it has rounds"
    dataset = repository.manifest(graph[f"data.{loop.prompts}"].ref)
    total = rows.get(loop.prompts) if dataset is None else int(dataset.metrics["rows"] or 0)
    before = None if start.previous_prompts is None else repository.manifest(start.previous_prompts)
    used = 0 if before is None else int(before.metrics["rows"] or 0) + int(before.metrics["used_before"] or 0)
    if total is not None and repository.manifest(graph[PROMPTS].ref) is None and total - used < loop.prompts_per_round:
        raise RecipeError(f"data.{loop.prompts}: {out_of_prompts(max(0, total - used), loop.prompts_per_round, used)}")
    begun = "" if start.prompts is None else ", which was started and has not ended"
    from_what = f"the model of `{loop.start}`" if start.accepted is None else str(start.accepted)
    yield f"round {start.number} of {recipe.name}{begun}: from {from_what}; {used} prompts were used before"
