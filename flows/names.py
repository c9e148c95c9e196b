"""Names of runs in the Prefect UI: recipe, seed and overrides, with tags to filter by."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from uuid import UUID

from prefect.client.orchestration import get_client

from rlhf_core.config.rl.stage import RLConfig
from rlhf_core.recipe.recipe import Recipe

_LONGEST = 200  # characters of a name


def name_run(run_id: UUID, name: str, recipe: Recipe, tags: Collection[str] = ()) -> None:
    """Name and tag the run. Keeps its existing tags."""
    with get_client(sync_client=True) as client:
        all_tags = {*client.read_flow_run(run_id).tags, *run_tags(recipe), *tags}
        client.update_flow_run(run_id, name=name, tags=sorted(all_tags))


def run_name(
    recipe: Recipe, overrides: Sequence[str], only: Collection[str] | None = None, rerun_from: str = ""
) -> str:
    """Return `tiny, seed 0: rl.steps=200`; for chosen nodes alone `tiny/rl, seed 0`; `…, again from sft`."""
    name = recipe.name if only is None else f"{recipe.name}/{'+'.join(sorted(only))}"
    others = " ".join(override for override in overrides if not override.startswith("seed="))
    again = f", again from {rerun_from}" if rerun_from else ""
    name = f"{name}, seed {recipe.seed}{again}{': ' if others else ''}{others}"
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def run_tags(recipe: Recipe) -> list[str]:
    """Return the recipe, and the algorithms of its RL stages."""
    algorithms = {stage.algorithm for stage in recipe.stages.values() if isinstance(stage, RLConfig)}
    return [recipe.name, *sorted(algorithms)]
