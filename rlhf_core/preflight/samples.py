"""Samples of a recipe's datasets: the first rows of each source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.data.sources import SourceConfig
from rlhf_core.data.bad_rows import BadRows, canonical
from rlhf_core.data.formats import RowError, Rows, format_of
from rlhf_core.data.images import ImageReader
from rlhf_core.data.kept import mix_problem
from rlhf_core.data.overlap import PromptIndex
from rlhf_core.data.sources.base import BadRow, Located, open_source
from rlhf_core.errors import RecipeError
from rlhf_core.recipe.recipe import Recipe


@dataclass
class Sample:
    """The readable part of a dataset."""

    format: str
    rows: list[Located] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    bad: BadRows = field(default_factory=BadRows)  # those that its job will drop
    columns: set[frozenset[str]] = field(default_factory=set)  # of each row, those that hold something


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
                first = _noted(open_source(source).first_rows(root, config.format, bad), sample.columns)
                rows = list(_canonical(first, config, bad, ImageReader.before_a_run(config.images, root)))
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
            "it others, or remove `exclude`"
        )
    sample.rows = left


def known_rows(config: DatasetConfig, sample: Sample | None, root: Path) -> int | None:
    """Return the rows of the dataset's source, before any are dropped; None if only its job can count them."""
    if config.source is None:
        return None
    rows = config.source.known_rows
    if rows is None and sample is not None and open_source(config.source).is_whole(len(sample.rows), root):
        rows = len(sample.rows)
    return None if rows is None else config.most_rows(rows)


def _unmixable(config: DatasetConfig, of_sources: Sequence[Sequence[Located]], root: Path) -> str | None:
    """Return the reason why the sources of a mix cannot be drawn from; None if they can, or if their remaining rows are
    not all known here.
    """
    if not config.mix or config.exclude or config.near_duplicates == "drop":
        return None
    if not all(
        open_source(entry.source).is_whole(len(rows), root) for entry, rows in zip(config.mix, of_sources, strict=True)
    ):
        return None
    seen: set[str] = set()
    left = []
    for rows in of_sources:
        keys = [format_of(config.format).duplicate_key(row) for _, row in rows]
        left.append(len(set(keys) - seen) if config.drop_duplicates else len(keys))
        seen.update(keys)
    return mix_problem(config, left)


def is_used_whole(recipe: Recipe, name: str) -> bool:
    """Return whether the dataset contains all rows of its source: else only its job knows the held-out rows."""
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


def sources_of(config: DatasetConfig) -> list[SourceConfig]:
    mixed = [entry.source for entry in config.mix]
    return mixed if config.source is None else [config.source, *mixed]


def _check_shape(name: str, config: DatasetConfig) -> Iterator[str]:
    if config.source is None and not config.mix:
        yield f"data.{name}: names neither `source` nor `mix`; give it one of them"
    if config.source is not None and config.mix:
        yield f"data.{name}: names both `source` and `mix`; move `source` into `mix`, or remove one"


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
