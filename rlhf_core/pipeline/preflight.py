"""Mistakes of a user that can be seen before a job starts, reported all at once."""

from __future__ import annotations

from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.loading import LoadedRecipe
from rlhf_core.pipeline.outline import Outline, outline
from rlhf_core.pipeline.preflight_data import bad_row_notes, check_datasets, check_overlaps, dataset_uses
from rlhf_core.pipeline.preflight_lengths import check_context, check_lengths
from rlhf_core.pipeline.preflight_model import check_bases, models_of
from rlhf_core.pipeline.preflight_rewards import check_rewards


def preflight(loaded: LoadedRecipe, drafts: Outline | None = None) -> list[str]:
    """Check the files, folders and lengths that the recipe names. Loads no torch, fetches nothing, runs no user code.

    Returns a sentence for each thing to know that is no mistake, such as rows that will be dropped.

    drafts: the recipe's outline, where it is known already.
    Raises RecipeError with one sentence a line: each says which setting is wrong, how, and what to write instead.
    """
    recipe, root = loaded.recipe, loaded.root
    nodes = (drafts or outline(recipe)).nodes
    uses = dataset_uses(nodes)
    samples, problems = check_datasets(recipe, uses, root)
    rows = {name: sample.rows for name, sample in samples.items()}
    problems += check_overlaps(nodes, recipe, samples)
    problems += check_rewards(nodes, rows, root)
    model_problems = check_bases(nodes, root)
    problems += model_problems
    models = {} if model_problems else models_of(nodes, root)
    problems += check_context(nodes, models)
    too_long, notes = check_lengths(recipe, uses, rows, models, root)
    problems += too_long
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
    return [*bad_row_notes(samples), *notes]
