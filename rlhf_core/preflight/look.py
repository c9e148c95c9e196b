"""Preflight: all checks of a recipe before a job starts, reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.errors import RecipeError, one_line
from rlhf_core.graph.outline import Outline, outline
from rlhf_core.preflight.columns import check_columns, column_notes
from rlhf_core.preflight.data import check_datasets, dataset_uses, is_misread, source_functions
from rlhf_core.preflight.effects import bad_row_notes, check_effects
from rlhf_core.preflight.environments import check_turns, environment_notes
from rlhf_core.preflight.images import check_images
from rlhf_core.preflight.lengths import check_context, check_lengths
from rlhf_core.preflight.loading import code_problems
from rlhf_core.preflight.model import BaseModel, check_bases, models_of
from rlhf_core.preflight.passed import check_passed
from rlhf_core.preflight.rewards import check_rewards, judging_functions
from rlhf_core.preflight.rubrics import check_rubrics
from rlhf_core.preflight.samples import Sample, known_rows
from rlhf_core.preflight.secrets import check_secrets
from rlhf_core.preflight.stages.context import CheckContext, check_stages
from rlhf_core.preflight.texts import check_texts
from rlhf_core.preflight.uses import check_models
from rlhf_core.recipe.loading import LoadedRecipe


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of the checks of a recipe's files."""

    notes: Sequence[str]  # a sentence for each thing to know that is no mistake, such as rows that will be dropped
    samples: Mapping[str, Sample]  # of datasets
    models: Mapping[str, BaseModel]  # by node, of those whose base model is at hand
    rows: Mapping[str, int]  # of each dataset whose rows could be counted


def preflight(loaded: LoadedRecipe, drafts: Outline | None = None) -> list[str]:
    """Return the notes of `look`."""
    return list(look(loaded, drafts).notes)


def look(loaded: LoadedRecipe, drafts: Outline | None = None) -> Seen:
    """Check the recipe's files, folders and lengths. Loads no torch and fetches nothing; the user's Python files are
    loaded in processes of their own.

    drafts: the recipe's outline, if it was drafted before.
    Raises RecipeError with one sentence per line: each names the setting, the problem, and the remedy.
    """
    recipe, root = loaded.recipe, loaded.root
    if secrets := check_secrets(recipe):
        raise RecipeError("\n".join(secrets))  # alone: other messages quote settings
    nodes = (drafts or outline(recipe)).nodes
    uses = dataset_uses(nodes)
    samples, problems = check_datasets(recipe, uses, root)
    # A dataset in another format than its stage's is a problem already, and no check could read its rows.
    misread = {use.dataset for use in uses if is_misread(use, recipe)}
    rows = {name: sample.rows for name, sample in samples.items() if name not in misread}
    all_uses = [use for use in uses if use.dataset not in misread]
    uses = [use for use in all_uses if use.dataset in recipe.data]
    problems += check_columns(recipe, samples)
    counted = {
        name: count for name in rows if (count := known_rows(recipe.data[name], samples[name], root)) is not None
    }
    problems += check_effects(recipe, nodes, rows)
    problems += check_rewards(nodes, rows)
    problems += check_texts(nodes, rows)
    problems += check_rubrics(nodes, rows, root)
    problems += code_problems([*source_functions(recipe, samples), *judging_functions(nodes)], root)
    problems += check_passed(nodes)
    model_problems = check_bases(nodes, root)
    problems += model_problems
    models = {} if model_problems else models_of(nodes, root)
    problems += check_context(nodes, models)
    problems += check_models(nodes, models, root)
    of_stages, stage_notes = check_stages(CheckContext(recipe, root, nodes, rows, counted, models))
    problems += of_stages
    too_long, notes = check_lengths(recipe, uses, rows, models, root)
    problems += too_long
    problems += check_images(all_uses, rows, models)
    problems += check_turns(nodes, models, root)
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(map(one_line, problems))))
    notes = [
        *bad_row_notes(samples),
        *column_notes(recipe, samples),
        *environment_notes(nodes, rows),
        *notes,
        *stage_notes,
    ]
    return Seen(list(dict.fromkeys(notes)), samples, models, counted)
