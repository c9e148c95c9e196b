"""The prices that hold for a run: the recipe's, else those of the file that ALIGNMENT_PRICES names."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from rlhf_core.artifacts.documents import first_problem
from rlhf_core.config.prices import PricesConfig
from rlhf_core.errors import RecipeError
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.system.variables import folder_of
from rlhf_core.system.yaml_text import YAMLTextError, read_yaml_file

PRICES_VARIABLE = "ALIGNMENT_PRICES"


def prices_of(recipe: Recipe | None) -> PricesConfig | None:
    """Return the prices for a recipe; None if none are given. Raises RecipeError for a file that has none."""
    if recipe is not None and recipe.prices is not None:
        return recipe.prices
    path = folder_of(PRICES_VARIABLE)
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return read_prices(path)  # which says why it cannot be read
    return _prices_in(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _prices_in(path: Path, changed_ns: int, size: int) -> PricesConfig:
    """Return the prices in a file; a page asks for those of each of its runs. changed_ns, size: of its version."""
    return read_prices(path)


def read_prices(path: Path) -> PricesConfig:
    """Return the prices in a YAML file. Raises RecipeError."""
    try:
        return PricesConfig.model_validate_json(json.dumps(read_yaml_file(path)))
    except YAMLTextError as error:
        raise RecipeError(f"{path}: {error}") from error
    except ValidationError as error:
        raise RecipeError(f"{path}: no table of prices ({first_problem(error)}): see docs/operate/cost.md") from error
