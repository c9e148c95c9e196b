"""All that a user can have got wrong and that can be seen before a job starts, reported at once."""

from __future__ import annotations

from rlhf_core.config.loading import LoadedRecipe
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.preflight_data import check_datasets, used_datasets
from rlhf_core.pipeline.preflight_lengths import check_context, check_lengths
from rlhf_core.pipeline.preflight_model import check_base, context_length
from rlhf_core.pipeline.preflight_rewards import check_rewards


def preflight(loaded: LoadedRecipe) -> None:
    """Check the files, folders and lengths that the recipe names. Loads no torch, fetches nothing, runs no user code.

    Raises RecipeError with one sentence a line: each says which setting is wrong, how, and what to write instead.
    """
    recipe, root = loaded.recipe, loaded.root
    uses = used_datasets(recipe)
    samples, problems = check_datasets(recipe, uses, root)
    problems += check_rewards(recipe, samples, root)
    model_problems = check_base(recipe, root)
    problems += model_problems
    if not model_problems:
        problems += check_context(recipe, context_length(recipe.base, root))
        problems += check_lengths(recipe, uses, samples, root)
    if problems:
        raise RecipeError("\n".join(problems))
