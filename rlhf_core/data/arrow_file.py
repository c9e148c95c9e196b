"""Rows in Arrow files: written one by one, read from memory-mapped pages, independent of memory size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlhf_core.errors import StageError, reason_of

_ROWS, _BYTES = 1000, 2**24  # of one record batch


class ArrowWriter:
    """Writes rows to a stream of record batches; the same rows give the same bytes. Closed by its context."""

    def __init__(self, path: Path, schema: Any) -> None:
        """schema: of pyarrow."""
        import pyarrow as pa

        self._schema = schema
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, schema)
        self._rows: list[Mapping[str, Any]] = []
        self._waiting = 0  # bytes of these

    def append(self, row: Mapping[str, Any], num_bytes: int) -> None:
        """Append a row. num_bytes: its approximate size in memory."""
        self._rows.append(row)
        self._waiting += num_bytes
        if len(self._rows) >= _ROWS or self._waiting >= _BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            self._stream.write_batch(pa.RecordBatch.from_pylist(self._rows, schema=self._schema))
            self._rows, self._waiting = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
            self._stream.close()
        finally:
            self._sink.close()


def record_batches(path: Path) -> Iterator[Any]:
    """Yield the file's record batches, whose columns are memory-mapped. Raises StageError for a file of another
    kind.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream
    except pa.ArrowInvalid as error:
        raise StageError(f"{path} is damaged, or not an Arrow stream ({reason_of(error)})") from error
