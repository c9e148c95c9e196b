"""Source rows: files, the Hugging Face hub, reasoning-gym, a user's function."""

from __future__ import annotations

import hashlib
import inspect
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf_core.config.data.dataset import (
    FilesSource,
    FunctionSource,
    HarborSource,
    HubSource,
    ReasoningGymSource,
    Source,
)
from rlhf_core.contract import StageContext
from rlhf_core.data.formats import Row, RowError
from rlhf_core.data.sources.arrow_rows import without_added_nulls
from rlhf_core.data.sources.files import BadRow, iterate_file, raise_bad_row
from rlhf_core.data.sources.harbor import iterate_tasks
from rlhf_core.data.sources.reasoning import generate
from rlhf_core.data.sources.remote import fetch_file, reading, require_unchanged
from rlhf_core.errors import StageError, reason_of
from rlhf_core.processes.user_code import load_function, user_error, why_unfit

Located = tuple[str, Row]  # where the row is, for messages; the row


def iterate_source(
    source: Source, data_format: str, context: StageContext, bad_row: BadRow = raise_bad_row
) -> Iterator[Located]:
    """Yield each row of `source` with its place.

    context: has the user's files and the pins of remote sources; bad_row: is called for each row that cannot be read.
    Raises RowError for a file that cannot be split into rows, and StageError for a source that cannot be read.
    """
    match source:
        case FilesSource():
            for path in source.paths:
                if "://" in path and source.streaming:
                    with reading(path):
                        yield from iterate_file(path, shown=path, bad_row=bad_row)
                else:
                    local = _fetched(path, context) if "://" in path else context.user_file(path)
                    yield from iterate_file(str(local), shown=path, bad_row=bad_row)
        case HubSource():
            yield from _hub_rows(source, context.pin(source.url) or source.revision)
        case ReasoningGymSource():
            for task, options in source.tasks.items():
                rows = generate(task, options, size=source.size, seed=source.seed, data_format=data_format)
                yield from ((f"{task} {index}", row) for index, row in enumerate(rows))
        case FunctionSource():
            yield from _function_rows(source, context.user_file(source.path), bad_row)
        case HarborSource():
            yield from iterate_tasks(context.user_folder(source.folder), source.folder, bad_row)


def streams(source: Source) -> bool:
    """Whether only the rows that its dataset takes are read from the source."""
    return isinstance(source, FilesSource | HubSource) and source.streaming


def require_as_planned(source: Source, context: StageContext) -> None:
    """Check a streaming source after it was read. Raises StageError if its content is not the planned one."""
    if isinstance(source, FilesSource):
        for url in source.paths:
            if "://" in url:
                require_unchanged(url, context.pin(url))


def _fetched(url: str, context: StageContext) -> Path:
    """Return a local copy of the file at `url`, with the content that the key was computed from."""
    target = context.workdir / "fetched" / hashlib.sha256(url.encode()).hexdigest()
    if not target.is_file():
        target.parent.mkdir(exist_ok=True)
        fetch_file(url, context.pin(url), target)
    return target


def _hub_rows(source: HubSource, revision: str) -> Iterator[Located]:
    import datasets

    name = source.repository if source.subset is None else f"{source.repository}/{source.subset}"
    try:
        rows = datasets.load_dataset(
            source.repository, name=source.subset, split=source.split, revision=revision, streaming=source.streaming
        )
        for index, row in enumerate(rows):
            yield f"{name} row {index}", without_added_nulls(row)
    except Exception as error:  # the library raises many types; all mean that this source cannot be had
        raise StageError(f"{name}, split {source.split}, revision {revision}: {reason_of(error)}") from error


def _function_rows(source: FunctionSource, file: Path, bad_row: BadRow) -> Iterator[Located]:
    function = load_function(file, source.function, source.path)
    name = f"{source.path}:{source.function}"
    try:
        inspect.signature(function).bind(**source.options)
    except (TypeError, ValueError) as error:
        raise StageError(f"{name} does not take the options {sorted(source.options)}: {why_unfit(error)}") from error
    try:
        returned = function(**source.options)
        rows = list(returned) if isinstance(returned, Iterable) else None
    except (Exception, SystemExit) as error:  # the user's code may raise anything; it is shown to them as it is
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            raise  # the job is stopped, and Ray has put its own handler in place
        raise StageError(f"{name} raised {user_error(error)}") from error
    if rows is None:
        raise StageError(f"{name} returned {type(returned).__name__}: it must return the rows, a list of dicts")
    for index, row in enumerate(rows):
        if isinstance(row, dict):
            yield f"{name} item {index}", row
        else:
            bad_row(f"{name} item {index}", RowError(f"is {type(row).__name__}, expected a dict", "not a dict"))
