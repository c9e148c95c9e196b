"""Rows of parquet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_core.data.formats import Row, RowError
from rlhf_core.data.sources.arrow_rows import without_added_nulls
from rlhf_core.data.sources.json_rows import Parsed
from rlhf_core.data.sources.opening import open_data
from rlhf_core.errors import reason_of
from rlhf_core.system.listing import first_repeated


def _values(batch: Any, where: str) -> list[Row]:
    try:
        return [without_added_nulls(row) for row in batch.to_pylist()]
    except (ValueError, OverflowError, LookupError) as error:  # a date after the year 9999, a time zone that is none
        raise RowError(
            f"{where}: a value cannot be converted to Python ({reason_of(error)}): write its column as text"
        ) from error


def parquet_rows(path: str, shown: str) -> Iterator[Parsed]:
    """Yield the rows of a file. Raises RowError for one that is damaged, or has a column twice."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with open_data(path, shown) as file:
        try:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
            twice = first_repeated(names)
            if twice is not None:
                raise RowError(f"{shown}: two columns are called `{twice}`: rename one of them")
            index = 0
            for batch in table.iter_batches(batch_size=1024):
                num_bytes = batch.nbytes // max(1, batch.num_rows) + 1
                for row in _values(batch, f"{shown} rows {index} to {index + batch.num_rows - 1}"):
                    yield f"{shown} row {index}", row, num_bytes
                    index += 1
        except RowError:
            raise
        except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
            raise RowError(
                f"{shown}: not a parquet file, or a damaged one: copy it again ({reason_of(error)})"
            ) from error
