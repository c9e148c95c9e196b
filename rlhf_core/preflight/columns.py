"""Preflight checks of columns: those renamed by `columns`, and those that no format reads."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping

from rlhf_core.config.data.dataset import DatasetConfig
from rlhf_core.config.data.sources import FilesSource
from rlhf_core.data.formats import UNUSED, format_of
from rlhf_core.errors import did_you_mean, one_line
from rlhf_core.preflight.samples import Sample, sources_of
from rlhf_core.recipe.recipe import Recipe

_ID = "id"  # of a canonical row, made of its content
_SHOWN_COLUMNS = 10


def check_columns(recipe: Recipe, samples: Mapping[str, Sample]) -> Iterator[str]:
    """Yield a problem for each column that `columns` renames to a name that nothing reads."""
    for name in samples:
        config = recipe.data[name]
        readable = format_of(config.format).reads
        for target in config.columns:
            if target == _ID:
                yield (
                    f"data.{name}.columns: `{_ID}` is made of the content of a row: remove it, or call the column "
                    f"`{UNUSED}`"
                )
            elif readable is not None and target not in {*readable, UNUSED}:
                yield (
                    f"data.{name}.columns: the format {config.format} has no column `{target}`"
                    f"{did_you_mean(target, [*readable, UNUSED])}; it has {', '.join(sorted(readable))}, and "
                    f"`{UNUSED}` leaves one out"
                )


def column_notes(recipe: Recipe, samples: Mapping[str, Sample]) -> Iterator[str]:
    """Yield a note for each dataset whose files have columns that its format does not read, and for each name in
    `columns` that nearly matches one of the format's.
    """
    for name, sample in samples.items():
        config = recipe.data[name]
        unread = sorted({column for columns in sample.columns for column in _unread(columns, config)})
        if unread:
            shown = ", ".join(column[:40] for column in unread[:_SHOWN_COLUMNS])
            more = f" and {len(unread) - _SHOWN_COLUMNS} more" if len(unread) > _SHOWN_COLUMNS else ""
            yield one_line(f"data.{name}: columns that are not read: {shown}{more}; `columns` says what one means")
        yield from _repeated_files(name, config)
        form = format_of(config.format)
        for target in config.columns:
            if (
                form.reads is None
                and target not in {*form.named, UNUSED}
                and (near := did_you_mean(target, form.named))
            ):
                yield one_line(f"data.{name}.columns: `{target}` is kept for rewards and environments alone{near}")


def _repeated_files(name: str, config: DatasetConfig) -> Iterator[str]:
    paths = [
        posixpath.normpath(path) if "://" not in path else path
        for source in sources_of(config)
        if isinstance(source, FilesSource)
        for path in source.paths
    ]
    for path in dict.fromkeys(paths):
        if paths.count(path) > 1:
            yield f"data.{name}: {path} is named {paths.count(path)} times, so its rows are read as often"


def _unread(columns: frozenset[str], config: DatasetConfig) -> set[str]:
    """Return the columns of one row that are not read.

    columns: non-empty columns, as named in the source.
    """
    named = {source: target for target, source in config.columns.items()}
    replaced = {column for column in columns - named.keys() if column in config.columns}
    sources = {named.get(column, column): column for column in columns - replaced}
    unread = format_of(config.format).unread(frozenset(sources)) - {_ID, UNUSED}
    return {sources[name] for name in unread} | replaced
