"""Samples of a recipe's datasets: the first rows of each source."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.config.data.dataset import (
    DatasetConfig,
    FilesSource,
    FunctionSource,
    HarborSource,
    HubSource,
    ReasoningGymSource,
    Source,
)
from rlhf_core.config.texts import hub_hint
from rlhf_core.data.bad_rows import BadRows, canonical
from rlhf_core.data.formats import Row, RowError, Rows, format_of
from rlhf_core.data.images import ImageReader
from rlhf_core.data.kept import mix_problem
from rlhf_core.data.overlap import PromptIndex
from rlhf_core.data.sources.files import SUFFIXES, BadRow, Budget, file_type, iterate_file
from rlhf_core.data.sources.harbor import iterate_tasks
from rlhf_core.data.sources.opening import COMPRESSIONS, name_problem
from rlhf_core.data.sources.reasoning import check_task, generate
from rlhf_core.errors import RecipeError
from rlhf_core.recipe.recipe import Recipe
from rlhf_core.system.paths import file_problem

Located = tuple[str, Row]  # where the row is, the canonical row

# The beginning of each source is read, up to these rows and decompressed bytes; of each file at least its first row.
_ROWS = 20_000
_BYTES = 64 * 2**20
_GENERATED_ROWS = 20  # of each reasoning-gym task
_GENERATING_SECONDS = 0.2


@dataclass
class Sample:
    """The readable part of a dataset."""

    format: str
    rows: list[Located] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    bad: BadRows = field(default_factory=BadRows)  # those that its job will drop
    columns: set[frozenset[str]] = field(default_factory=set)  # of each row of its files, those that hold something


def read_samples(recipe: Recipe, names: list[str], root: Path) -> dict[str, Sample]:
    """Return a sample of each of the datasets and of those that they exclude."""
    samples = {}
    for name in _with_excluded(recipe, names):
        config = recipe.data[name]
        sample = samples[name] = Sample(config.format)
        of_sources: list[list[Located]] = []
        for source in sources_of(config):
            bad = sample.bad if config.on_bad_row == "drop" else BadRows()
            try:
                rows = _check_source(source, config, root, bad, sample.columns)
            except (RowError, RecipeError) as error:
                sample.problems.append(f"data.{name}: {error}")
                rows = []
            if config.on_bad_row == "error" and bad.count:
                sample.problems.append(f"data.{name}: {bad.problem(len(rows) + bad.count)}")
            else:
                of_sources.append(rows)
        sample.rows = [located for rows in of_sources for located in rows]
        if sample.bad.count and not sample.rows and not sample.problems:
            sample.problems.append(f"data.{name}: no row can be read: {sample.bad.sentence()}")
        sample.problems += _check_shape(name, config)
        if not sample.problems and (problem := _unmixable(config, of_sources, root)):
            sample.problems.append(f"data.{name}: {problem}")
    for name, sample in samples.items():
        _drop_excluded(name, sample, samples, recipe, root)
    return samples


def _drop_excluded(name: str, sample: Sample, samples: Mapping[str, Sample], recipe: Recipe, root: Path) -> None:
    """Drop the rows of the sample that its job will, as far as the excluded datasets could be read."""
    config = recipe.data[name]
    excluded = PromptIndex(
        {other: rows_of(recipe, samples, other) for other in config.exclude if is_used_whole(recipe, other)}
    )
    left = [(where, row) for where, row in sample.rows if not excluded.find(row, format_of(config.format))]
    if sample.rows and not left and known_rows(config, sample, root) is not None and not sample.problems:
        sample.problems.append(
            f"data.{name}: all {len(sample.rows)} rows occur in {', '.join(config.exclude)}, which it excludes: give "
            "it others, or leave `exclude` out"
        )
    sample.rows = left


def known_rows(config: DatasetConfig, sample: Sample | None, root: Path) -> int | None:
    """Return the rows of the dataset's source, before any are dropped; None if only its job can count them."""
    rows = None
    match config.source:
        case ReasoningGymSource(tasks=tasks, size=size):
            rows = len(tasks) * size
        case FilesSource(paths=paths) if sample is not None and _is_whole(
            len(sample.rows), [root / path for path in paths]
        ):
            rows = len(sample.rows)
    return None if rows is None else config.most_rows(rows)


def _is_whole(rows: int, files: Sequence[Path]) -> bool:
    """Whether these rows are all of the files: of many rows or bytes a sample has only the first."""
    if rows >= _ROWS or not all(map(os.path.isfile, files)):
        return False
    decompresses = any(path.suffix in (".gz", ".bz2", ".xz", ".zst", ".zip") for path in files)
    return not decompresses and sum(path.stat().st_size for path in files) < _BYTES


def _unmixable(config: DatasetConfig, of_sources: Sequence[Sequence[Located]], root: Path) -> str | None:
    """Return the reason why the sources of a mix of files cannot be drawn from; None if they can, or if their remaining
    rows are not all known here.
    """
    files = [entry.source for entry in config.mix if isinstance(entry.source, FilesSource)]
    paths = [root / path for source in files for path in source.paths]
    is_whole = len(files) == len(config.mix) > 0 and _is_whole(sum(map(len, of_sources)), paths)
    if not is_whole or config.exclude or config.near_duplicates == "drop":
        return None
    seen: set[str] = set()
    left = []
    for rows in of_sources:
        keys = [format_of(config.format).duplicate_key(row) for _, row in rows]
        left.append(len(set(keys) - seen) if config.drop_duplicates else len(keys))
        seen.update(keys)
    return mix_problem(config, left)


def is_used_whole(recipe: Recipe, name: str) -> bool:
    """Whether the dataset contains all rows of its source: else only its job knows the held-out rows."""
    config = recipe.data.get(name)
    return config is not None and not (config.mix or config.exclude) and config.limit is config.share is None


def rows_of(recipe: Recipe, samples: Mapping[str, Sample], name: str) -> Rows:
    read = [row for _, row in samples[name].rows] if name in samples else []
    return Rows(format_of(recipe.data[name].format), read)


def _with_excluded(recipe: Recipe, names: list[str]) -> list[str]:
    """Return `names` and the datasets they exclude, without unknown ones, which the graph reports."""
    included: list[str] = []
    pending = list(reversed(names))
    while pending:
        name = pending.pop()
        if name in recipe.data and name not in included:
            included.append(name)
            pending += recipe.data[name].exclude
    return included


def sources_of(config: DatasetConfig) -> list[Source]:
    mixed = [entry.source for entry in config.mix]
    return mixed if config.source is None else [config.source, *mixed]


def _check_shape(name: str, config: DatasetConfig) -> Iterator[str]:
    if config.source is None and not config.mix:
        yield f"data.{name}: names neither `source` nor `mix`; give it one of them"
    if config.source is not None and config.mix:
        yield f"data.{name}: names both `source` and `mix`; move `source` into `mix`, or take one away"


def _check_source(
    source: Source, config: DatasetConfig, root: Path, bad_row: BadRow, columns: set[frozenset[str]]
) -> list[Located]:
    """Return the rows that can be read quickly. Raises RowError or RecipeError for a source that cannot be read."""
    match source:
        case FilesSource():
            return list(_check_files(source, config, root, bad_row, columns))
        case ReasoningGymSource():
            for task, options in source.tasks.items():
                check_task(task, options)
            return [row for task in source.tasks for row in _generated(task, source, config, bad_row, root)]
        case FunctionSource():
            return []  # its code is checked beside that of rewards
        case HarborSource():
            tasks = iterate_tasks(root / source.folder, source.folder, bad_row)
            return list(_canonical(tasks, config, bad_row, ImageReader.before_a_run(config.images, root)))
        case HubSource():
            return []  # nothing is fetched before the run


def _check_files(
    source: FilesSource, config: DatasetConfig, root: Path, bad_row: BadRow, columns: set[frozenset[str]]
) -> Iterator[Located]:
    budget = Budget(_BYTES)
    images = ImageReader.before_a_run(config.images, root)
    rows = 0
    for path in source.paths:
        if "://" in path:
            file_type(path)
            continue
        problem = _path_problem(path, root)
        if problem:
            raise RowError(f"{path}: {problem}")
        budget.num_bytes = max(budget.num_bytes, 1)
        read = _noted(iterate_file(str(root / path), path, bad_row, budget), columns)
        for located in _canonical(read, config, bad_row, images):
            rows += 1
            yield located
            if rows >= _ROWS:
                break


def _path_problem(path: str, root: Path) -> str | None:
    if unnamed := name_problem(path):
        return unnamed
    local = root / path
    problem = file_problem(local)
    if problem is None:
        return None
    if glob.has_magic(path) and not os.path.lexists(local):
        return f"no file matches this pattern (looked in {root})"
    if os.path.isdir(local):
        return f"there is no data file in this folder, whose name ends in {', '.join(SUFFIXES)}"
    plain = "; write the path out: `~` and `$` mean nothing here" if path.startswith("~") or "$" in path else ""
    hub = "" if os.path.lexists(local) or Path(path).suffix in (*SUFFIXES, *COMPRESSIONS) else hub_hint(path)
    return f"{problem} (looked for {local}){plain}{hub}"


def _noted(rows: Iterable[Located], columns: set[frozenset[str]]) -> Iterator[Located]:
    """Yield `rows`, adding the non-empty columns of each to `columns`."""
    for where, raw in rows:
        columns.add(frozenset(name for name, value in raw.items() if value is not None and value != ""))
        yield where, raw


def _canonical(
    rows: Iterable[Located], config: DatasetConfig, bad_row: BadRow, images: ImageReader
) -> Iterator[Located]:
    for where, raw in rows:
        row = canonical(where, raw, config, bad_row, images)
        if row is not None:
            yield where, row


def _generated(
    task: str, source: ReasoningGymSource, config: DatasetConfig, bad_row: BadRow, root: Path
) -> Iterator[Located]:
    until = time.monotonic() + _GENERATING_SECONDS
    size = min(source.size, _GENERATED_ROWS)
    rows = generate(task, source.tasks[task], size=size, seed=source.seed, data_format=config.format)
    items = ((f"{task} item {index}", raw) for index, raw in enumerate(rows))
    for located in _canonical(items, config, bad_row, ImageReader.before_a_run(config.images, root)):
        yield located
        if time.monotonic() > until:
            return
