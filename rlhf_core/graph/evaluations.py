"""Evaluations that a gate reads: their nodes, and whether they have the scores that it compares."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf_core.config.stages.evaluation import Completions, EvaluatesModels
from rlhf_core.errors import RecipeError, did_you_mean
from rlhf_core.recipe.recipe import Recipe


def evaluation_node(recipe: Recipe, nodes: Collection[str], place: str, name: str, model: str) -> str:
    """Return the node of the stage `name` that evaluates `model`.

    nodes: the names of those above; place: the setting that names the stage. Raises RecipeError if there is none.
    """
    known = evaluations_of(recipe)
    if name not in known:
        raise RecipeError(
            f"{place}: there is no stage `evaluation` called `{name}`{did_you_mean(name, known)}; there are "
            f"{', '.join(known) or 'none'}"
        )
    node = f"{name}.{model}"
    if node not in nodes:
        if not any(other.startswith(f"{name}.") for other in nodes):
            raise RecipeError(f"{place}: `{name}` comes later in the recipe: move it above")
        raise RecipeError(
            f"{place}: `{name}` does not evaluate `{model}`: add it to {name}.models, or remove that for all"
        )
    return node


def score_problem(
    recipe: Recipe, place: str, evaluation: str, scorer: str | None, completions: Completions
) -> str | None:
    """Return the problem of an evaluation without the scores that the settings at `place` compare; None if it has
    them.
    """
    problem = evaluations_of(recipe)[evaluation].score_problem(evaluation, scorer, completions)
    return None if problem is None else f"{place}.{problem}"


def evaluations_of(recipe: Recipe) -> Mapping[str, EvaluatesModels]:
    """Return the recipe's stages that evaluate models by name."""
    return {name: config for name, config in recipe.stages.items() if isinstance(config, EvaluatesModels)}
