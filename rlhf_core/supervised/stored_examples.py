"""Encoded examples on disk: read by number from memory-mapped Arrow, however many there are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, overload

from rlhf_core.data.arrow_file import ArrowWriter, record_batches
from rlhf_core.supervised.examples import Example
from rlhf_core.types import SequenceImage

_BYTES_OF_TOKEN = 5  # of its id, and about that of its mask


class StoredExamples(Sequence[Example]):
    """Examples on disk, created on access. Only the order of a selection is in memory."""

    def __init__(
        self, batches: Sequence[Any], numbers: Sequence[int], references: Sequence[tuple[float, ...]] | None = None
    ) -> None:
        """batches: of Arrow; numbers: the selected rows; references: log-probs of all of their rows."""
        self._batches = batches
        self._starts = list(accumulate((batch.num_rows for batch in batches), initial=0))
        self._numbers = numbers
        self._references = references

    @classmethod
    def of(cls, examples: Iterable[Example], folder: Path) -> Self:
        """Write examples to a file in `folder`, which is deleted after its last reader."""
        with TemporaryDirectory(dir=folder) as name:
            path = Path(name) / "examples.arrow"
            with ArrowWriter(path, _schema()) as writer:
                for example in examples:
                    row: dict[str, Any] = {column: getattr(example, column) for column in _COLUMNS}
                    row["images"] = [list(map(asdict, images)) for images in example.images]
                    writer.append(row, example.num_tokens * _BYTES_OF_TOKEN)
            batches = list(record_batches(path))  # mapped: they stay when the file has no name any more
        return cls(batches, range(sum(batch.num_rows for batch in batches)))

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return list(map(self._example, self._numbers[index]))
        return self._example(self._numbers[index])

    def select(self, indices: Iterable[int]) -> Self:
        """Return the examples with these indices, in that order."""
        return type(self)(self._batches, [self._numbers[index] for index in indices], self._references)

    def with_references(self, references: Sequence[tuple[float, ...]]) -> Self:
        """Add log-probs. references: of each row; no selection has been made."""
        return type(self)(self._batches, self._numbers, references)

    def values(self, column: str) -> Iterator[Any]:
        """Yield a field of each Example, read without the others."""
        for number in self._numbers:
            batch, row = self._place(number)
            yield batch.column(column)[row].as_py()

    def _example(self, number: int) -> Example:
        batch, row = self._place(number)
        columns: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
        columns |= {name: tuple(columns[name]) for name in ("sequences", "masks", "targets")}
        columns["images"] = tuple(tuple(map(_image, images)) for images in columns["images"])
        example = Example(**columns)
        return example if self._references is None else replace(example, reference=self._references[number])

    def _place(self, number: int) -> tuple[Any, int]:
        index = bisect_right(self._starts, number) - 1
        return self._batches[index], number - self._starts[index]


_COLUMNS = ("row_id", "sequences", "masks", "margin", "desirable", "targets", "images")


def _image(stored: dict[str, Any]) -> SequenceImage:
    return SequenceImage(**{**stored, "written": tuple(stored["written"])})


def _schema() -> Any:
    import pyarrow as pa

    written = pa.list_(pa.int32())
    image = pa.struct({"path": pa.string(), "start": pa.int32(), "length": pa.int32(), "written": written})
    types = (
        pa.string(), pa.list_(pa.list_(pa.int32())), pa.list_(pa.list_(pa.bool_())), pa.float64(), pa.bool_(),
        pa.list_(pa.float64()), pa.list_(pa.list_(image)),
    )  # fmt: skip
    return pa.schema(list(zip(_COLUMNS, types, strict=True)))
