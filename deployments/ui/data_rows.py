"""Rows of a dataset artifact, read from the part of its Arrow file that holds them, without a copy of the file.

The file is a stream of record batches without an index. Each begins with its length and its number of rows, so those
before the wanted rows are skipped; where they begin is remembered, for files never change.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlhf_core.artifacts.manifest import FileEntry
from rlhf_core.artifacts.repository import blob_path
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import IntegrityError, reason_of

_HEADER = 4096  # bytes that are read of each batch: its description has a few hundred
_MOST_DESCRIPTION = 2**16
_MOST_BYTES = 2**28  # of one batch: ArrowWriter closes it at 2**24, behind a row of any size
_MOST_FILES = 32  # whose batches are remembered
_SCHEMA, _RECORD_BATCH = 1, 3  # kinds of messages in a stream of Arrow
_DAMAGE = (struct.error, ValueError, LookupError, TypeError, RecursionError)
# Numbers of fields in the tables Message and RecordBatch of Arrow's Message.fbs.
_KIND, _DESCRIPTION, _BODY_LENGTH = 1, 2, 3
_NUM_ROWS, _COMPRESSION = 0, 3


@dataclass(frozen=True, slots=True)
class StoredRow:
    number: int  # in the dataset, from 0
    characters: int
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Message:
    start: int  # in the file
    end: int
    kind: int
    rows: int


@dataclass
class _Batches:
    """The batches of a file that have been passed so far."""

    schema: _Message | None = None
    passed: list[_Message] = field(default_factory=list)
    rows: int = 0  # of these
    next_start: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class DataRows:
    """Reads rows of Arrow files in a store; safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: OrderedDict[str, _Batches] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, file: FileEntry, start: int, count: int) -> list[StoredRow]:
        """Return `count` rows from the row `start`, or fewer at the end. Raises IntegrityError for a damaged file."""
        import pyarrow as pa

        known = self._known(file)
        rows: list[StoredRow] = []
        with known.lock:
            try:
                for first, batch in self._batches(file, known, start):
                    texts = self._texts(file, known, batch)
                    skipped = max(0, start - first)
                    for index, text in islice(enumerate(texts), skipped, skipped + count - len(rows)):
                        rows.append(StoredRow(first + index, len(text), _parsed(text)))
                    if len(rows) == count:
                        break
            except (pa.ArrowException, OSError, *_DAMAGE) as error:  # OSError: pyarrow raises it, too
                why = reason_of(error)
                raise IntegrityError(f"{file.path} is damaged, or has no rows of a dataset ({why})") from error
        return rows

    def _known(self, file: FileEntry) -> _Batches:
        with self._lock:
            known = self._files.setdefault(file.sha256, _Batches())
            self._files.move_to_end(file.sha256)
            if len(self._files) > _MOST_FILES:
                self._files.popitem(last=False)
        return known

    def _batches(self, file: FileEntry, known: _Batches, start: int) -> Iterator[tuple[int, _Message]]:
        """Yield the batches from the one that has the row `start`, each with the number of its first row."""
        first = 0
        for batch in list(known.passed):
            if first + batch.rows > start:
                yield first, batch
            first += batch.rows
        while known.next_start < file.size:
            message = _message(self._part(file, known.next_start, _HEADER), known.next_start, file.size)
            if message is None:
                return
            known.next_start = message.end
            if message.kind == _SCHEMA and known.schema is None:
                known.schema = message
                continue
            if message.kind != _RECORD_BATCH or known.schema is None:
                raise ValueError("it is no stream of one schema and its record batches")
            known.passed.append(message)
            first, known.rows = known.rows, known.rows + message.rows
            if known.rows > start:
                yield first, message

    def _texts(self, file: FileEntry, known: _Batches, batch: _Message) -> list[Any]:
        import pyarrow as pa

        assert known.schema is not None
        if batch.end - batch.start > _MOST_BYTES:
            raise ValueError(f"a batch has {batch.end - batch.start} bytes, too many for a page")
        parts = [self._part(file, each.start, each.end - each.start) for each in (known.schema, batch)]
        read = pa.ipc.open_stream(b"".join(parts)).read_next_batch()
        read.validate(full=True)  # a damaged offset would lead out of the memory
        column = read.column("row")
        return list((column.storage if isinstance(column, pa.ExtensionArray) else column).to_pylist())

    def _part(self, file: FileEntry, start: int, size: int) -> bytes:
        data = self._store.get_range(blob_path(file.sha256), start, size)
        if data is None:
            raise IntegrityError(
                f"{file.path} is gone from the store: `alignment repair` takes its artifact out of use"
            )
        if len(data) < min(size, file.size - start):
            raise ValueError("it is shorter than its manifest says")
        return data


def _message(data: bytes, start: int, file_size: int) -> _Message | None:
    """Return the message that begins with `data`; None for the end of the stream."""
    if data[:4] != b"\xff\xff\xff\xff":
        raise ValueError("a batch does not begin where the one before ends")
    (size,) = struct.unpack_from("<i", data, 4)
    if size == 0:
        return None
    if not 0 < size <= min(_MOST_DESCRIPTION, len(data) - 8):
        raise ValueError(f"the description of a batch has {size} bytes")
    table = data[8 : 8 + size]
    (root,) = struct.unpack_from("<I", table)
    kind = _number(table, root, _KIND, "<B")
    at = _position(table, root, _DESCRIPTION)
    rows = 0
    if kind == _RECORD_BATCH and at is not None:
        batch = at + struct.unpack_from("<I", table, at)[0]
        if _position(table, batch, _COMPRESSION) is not None:  # it may become any size in memory
            raise ValueError("a batch is compressed")
        rows = _number(table, batch, _NUM_ROWS, "<q")
    end = start + 8 + size + _number(table, root, _BODY_LENGTH, "<q")
    if not start < end <= file_size or rows < 0:
        raise ValueError("a batch is longer than the file")
    return _Message(start, end, kind, rows)


def _position(data: bytes, table: int, number: int) -> int | None:
    """Return where a flatbuffers table has a field; None if it is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size, _, *_ = struct.unpack_from("<HH", data, vtable)
    slot = 4 + 2 * number
    offset = struct.unpack_from("<H", data, vtable + slot)[0] if slot < size else 0
    return table + offset if offset else None


def _number(data: bytes, table: int, number: int, form: str) -> int:
    at = _position(data, table, number)
    return 0 if at is None else int(struct.unpack_from(form, data, at)[0])


def _parsed(text: Any) -> dict[str, Any]:
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError("a row is no mapping")
    return row
