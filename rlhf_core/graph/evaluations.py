"""Evaluations that a gate reads: their nodes, and whether they have the scores that it compares."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf_core.config.stages.evaluation import Completions, EvaluationConfig
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
            f"{place}: `{name}` does not evaluate `{model}`: add it to {name}.models, or leave that out for all"
        )
    return node


def score_problem(
    recipe: Recipe, place: str, evaluation: str, scorer: str | None, completions: Completions
) -> str | None:
    """Return the problem of an evaluation without the scores that the settings at `place` compare; None if it has
    them.
    """
    config = evaluations_of(recipe)[evaluation]
    if scorer is not None and scorer not in config.scorers:
        return f"{place}.scorer: `{evaluation}` has no scorer `{scorer}`; it has {', '.join(config.scorers)}"
    if completions == "sampled" and not config.samples:
        return f"{place}.completions: `{evaluation}` samples none: raise {evaluation}.samples, or compare greedy"
    return None


def evaluations_of(recipe: Recipe) -> Mapping[str, EvaluationConfig]:
    """Return the recipe's stages `evaluation` by name."""
    return {name: config for name, config in recipe.stages.items() if isinstance(config, EvaluationConfig)}
