"""Rewards before anything runs: the user's files, the patterns, the columns that a verifier reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config.recipe import Recipe
from rlhf_core.config.rewards import FunctionReward, RewardConfig, VerifierReward
from rlhf_core.data.user_code import check_function
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.pipeline.preflight_data import Located
from rlhf_core.rewards.verifier import compiled_pattern

_COLUMNS = {"exact": ("answer",), "reasoning_gym": ("task", "metadata")}


def check_rewards(recipe: Recipe, samples: dict[str, list[Located]], root: Path) -> list[str]:
    """samples: rows of each dataset that could be read."""
    problems = []
    for section, reward, dataset in _rewards(recipe):
        try:
            _check(reward, samples.get(dataset, []), dataset, root)
        except (RecipeError, RewardError) as error:
            problems.append(f"{section}: {error}")
    return list(dict.fromkeys(problems))


def _rewards(recipe: Recipe) -> Iterator[tuple[str, RewardConfig, str]]:
    """Each reward that will be used: its section, its settings, the dataset that it judges."""
    if recipe.rl:
        for name, reward in recipe.rl.settings.rewards.items():
            yield f"rl.{recipe.rl.block}.rewards.{name}", reward, recipe.rl.dataset
        for name, monitor in recipe.rl.monitors.items():
            yield f"rl.monitors.{name}", monitor, recipe.rl.dataset
        if recipe.rl.validation:
            for name, scorer in recipe.rl.validation.scorers.items():
                yield f"rl.validation.scorers.{name}", scorer, recipe.rl.validation.dataset
    if recipe.evaluation:
        for name, scorer in recipe.evaluation.scorers.items():
            yield f"evaluation.scorers.{name}", scorer, recipe.evaluation.dataset


def _check(reward: RewardConfig, rows: list[Located], dataset: str, root: Path) -> None:
    match reward:
        case FunctionReward():
            check_function(root / reward.path, reward.function, reward.path)
        case VerifierReward():
            compiled_pattern(reward.pattern)
            for where, row in rows:
                lacking = [column for column in _COLUMNS[reward.kind] if column not in row]
                if lacking:
                    raise RecipeError(
                        f"the verifier `{reward.kind}` needs the column `{lacking[0]}`, "
                        f"which `data.{dataset}` lacks at {where}"
                    )
        case _:
            pass  # a reward model is made by the run, a server is where the jobs are
