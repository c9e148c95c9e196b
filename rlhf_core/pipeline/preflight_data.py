"""Datasets before anything runs: is the file there, is it what it says, has it the columns its stage needs?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rlhf_core.config.data import (
    DataFormat,
    DatasetConfig,
    FilesSource,
    FunctionSource,
    HubSource,
    ReasoningGymSource,
    Source,
)
from rlhf_core.config.recipe import Recipe
from rlhf_core.data.files import file_type, iterate_file
from rlhf_core.data.formats import Row, RowError, canonical_row
from rlhf_core.data.reasoning import check_task, generate
from rlhf_core.data.user_code import check_function
from rlhf_core.errors import RecipeError
from rlhf_core.pipeline.graph import skipped_sections

Located = tuple[str, Row]  # where the row is, the canonical row

_LARGE_FILE = 64 * 2**20  # bytes; of a larger file only the beginning is read
_ROWS = 20_000
_ROWS_OF_LARGE_FILE = 1000
_GENERATED_ROWS = 20  # of each reasoning-gym task
_GENERATING_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Use:
    """A stage's section reads a dataset, and needs it in a format."""

    section: str
    dataset: str
    format: DataFormat


def used_datasets(recipe: Recipe) -> list[Use]:
    """What the stages that will run read."""
    formats: dict[str, DataFormat] = {
        "pretrain": "text",
        "sft": "conversations",
        "reward_model": "preferences",
        "rl": "prompts",
        "evaluation": "prompts",
    }
    skipped = skipped_sections(recipe)
    uses = []
    for section, data_format in formats.items():
        settings = getattr(recipe, section)
        if settings is not None and section not in skipped:
            uses.append(Use(section, settings.dataset, data_format))
    if recipe.rl is not None and recipe.rl.validation is not None:
        uses.append(Use("rl.validation", recipe.rl.validation.dataset, "prompts"))
    return uses


def check_datasets(recipe: Recipe, uses: list[Use], root: Path) -> tuple[dict[str, list[Located]], list[str]]:
    """Rows of each dataset that could be read here, as samples, and the problems."""
    problems = []
    for use in uses:
        given = recipe.data.get(use.dataset)
        if given is not None and given.format != use.format:
            problems.append(
                f"{use.section}.dataset: `{use.dataset}` has the format {given.format}, "
                f"{use.section} needs {use.format}: name another dataset or change `data.{use.dataset}`"
            )
    samples: dict[str, list[Located]] = {}
    for name in _with_excluded(recipe, [use.dataset for use in uses]):
        samples[name] = []
        for source in _sources(recipe.data[name]):
            try:
                samples[name] += _check_source(source, recipe.data[name], root)
            except (RowError, RecipeError) as error:
                problems.append(f"data.{name}: {error}")
        problems += _check_shape(name, recipe.data[name])
    return samples, problems


def _with_excluded(recipe: Recipe, names: list[str]) -> list[str]:
    """`names` and what they exclude, without those that are not there: the graph reports these."""
    found: list[str] = []
    pending = list(reversed(names))
    while pending:
        name = pending.pop()
        if name in recipe.data and name not in found:
            found.append(name)
            pending += recipe.data[name].exclude
    return found


def _sources(config: DatasetConfig) -> list[Source]:
    mixed = [entry.source for entry in config.mix]
    return mixed if config.source is None else [config.source, *mixed]


def _check_shape(name: str, config: DatasetConfig) -> Iterator[str]:
    if config.source is None and not config.mix:
        yield f"data.{name}: names neither `source` nor `mix`; give it one of them"
    if config.source is not None and config.mix:
        yield f"data.{name}: names both `source` and `mix`; move `source` into `mix`, or take one away"
    if name in config.exclude:
        yield f"data.{name}.exclude: a dataset cannot exclude itself"


def _check_source(source: Source, config: DatasetConfig, root: Path) -> list[Located]:
    """Rows that could be read quickly. Raises RowError or RecipeError for the first problem."""
    match source:
        case FilesSource():
            return [row for path in source.paths for row in _check_file(path, config, root)]
        case ReasoningGymSource():
            for task, options in source.tasks.items():
                check_task(task, options)
            return [row for task in source.tasks for row in _generated(task, source, config)]
        case FunctionSource():
            check_function(root / source.path, source.function, source.path)
            return []
        case HubSource():
            return []  # nothing is fetched before the run


def _check_file(path: str, config: DatasetConfig, root: Path) -> list[Located]:
    suffix = file_type(path)
    if "://" in path:
        return []
    local = root / path
    if not local.is_file():
        what = "is a folder, name the files in it" if local.is_dir() else "there is no such file"
        raise RowError(f"{path}: {what} (looked for {local})")
    large = local.stat().st_size > _LARGE_FILE
    if large and suffix == ".json":
        return []  # one value, which can only be read whole
    rows = iterate_file(str(local), shown=path)
    return [
        (where, _canonical(where, raw, config)) for where, raw in islice(rows, _ROWS_OF_LARGE_FILE if large else _ROWS)
    ]


def _canonical(where: str, raw: Row, config: DatasetConfig) -> Row:
    try:
        return canonical_row(raw, config.format, config.columns)
    except RowError as error:
        raise RowError(f"{where}: {error}") from error


def _generated(task: str, source: ReasoningGymSource, config: DatasetConfig) -> Iterator[Located]:
    until = time.monotonic() + _GENERATING_SECONDS
    size = min(source.size, _GENERATED_ROWS)
    rows = generate(task, source.tasks[task], size=size, seed=source.seed, data_format=config.format)
    for index, raw in enumerate(rows):
        where = f"{task} item {index}"
        yield where, _canonical(where, raw, config)
        if time.monotonic() > until:
            return
