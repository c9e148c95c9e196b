"""Dataset artifacts: `data.arrow` with one canonical row per row, `info.json` with their origin.

A row is its `id` and the row itself as JSON, in Arrow's own type for that: columns of Arrow would give the arguments of
one tool call the names of all others'. `datasets.Dataset.from_file` reads the file, and returns rows as mappings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.chat.image_messages import images_of_row
from rlhf_core.config.data.format_table import FORMATS
from rlhf_core.data.arrow_file import ArrowWriter, record_batches
from rlhf_core.data.fitting import Fitted, RowPolicy
from rlhf_core.data.formats import Rows, format_of
from rlhf_core.errors import StageError

DATA_FILE = "data.arrow"
INFO_FILE = "info.json"
IMAGES_FOLDER = "images"  # there are some: a file for each, called by its SHA-256
NO_IMAGES = "give it rows without images, or take a stage that reads them (docs/guides/vision.md)"
_OLD_DATA_FILE = "data.jsonl"  # of dataset artifacts before version 7 of the stage: a row a line


def require_seen_by_all(
    rows: Iterable[Mapping[str, Any]], text_readers_of: Callable[[Mapping[str, Any]], Sequence[str]]
) -> None:
    """Raise StageError for a row with images that has readers of text only.

    text_readers_of: as StageConfig.text_readers_of.
    """
    for row in rows:
        if images_of_row(row) and (readers := text_readers_of(row)):
            raise StageError(f"row {row['id']} has images, and {readers[0]} reads text alone: remove it")


def has_images(folder: Path) -> bool:
    """Return whether rows of a dataset artifact have images."""
    return (folder / IMAGES_FOLDER).is_dir()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return all canonical rows (rlhf_core/data/formats) of a dataset artifact, in order.

    Raises StageError as iterate_rows.
    """
    return list(iterate_rows(folder))


def iterate_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of `read_rows` one at a time. Raises StageError if the folder is not a dataset artifact."""
    if (folder / DATA_FILE).is_file():
        for batch in record_batches(folder / DATA_FILE):
            yield from map(json.loads, batch.column("row").storage.to_pylist())
    elif (folder / _OLD_DATA_FILE).is_file():
        with (folder / _OLD_DATA_FILE).open(encoding="utf-8") as file:
            yield from map(json.loads, file)
    else:
        raise StageError(f"{folder}: there is no {DATA_FILE}, so this is not a dataset artifact")


def count_rows(folder: Path) -> int:
    """Return the number of rows of a dataset artifact."""
    if (folder / DATA_FILE).is_file():
        return sum(batch.num_rows for batch in record_batches(folder / DATA_FILE))
    return sum(1 for _ in iterate_rows(folder))


def require_all_read(folder: Path, fitted: Fitted[Any]) -> None:
    """Raise StageError unless `fitted` is of all rows of the dataset artifact."""
    if fitted.read != (rows := count_rows(folder)):
        raise StageError(f"{fitted.read} rows were read of a dataset of {rows}: nothing was started; report this")


def read_dataset(folder: Path) -> Rows:
    """Return the rows of a dataset artifact, read lazily, and their format.

    Raises StageError if the folder is not a dataset artifact, or of an unknown format.
    """
    if not (folder / INFO_FILE).is_file():
        raise StageError(f"{folder}: there is no {INFO_FILE}, so this is not a dataset artifact")
    name = dataset_info(folder).get("format")
    if not isinstance(name, str) or name not in FORMATS:
        raise StageError(f"{folder}: its rows have the format {name}, but there are {', '.join(FORMATS)}")
    return Rows(format_of(name), iterate_rows(folder))


def row_policy(folder: Path) -> RowPolicy:
    """Return the recipe's treatment of rows of this dataset artifact that a stage cannot use as they are."""
    info = dataset_info(folder)
    return RowPolicy(long=info.get("on_long_row", "error"), bad=info.get("on_bad_row", "error"))


def dataset_info(folder: Path) -> dict[str, Any]:
    """Return the origin of a dataset artifact, and its format."""
    info: dict[str, Any] = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))
    return info


def write_dataset(
    folder: Path, rows: Iterable[Mapping[str, Any]], info: Mapping[str, Any], *, images_from: Sequence[Path] = ()
) -> dict[str, int]:
    """Write `rows` and `info` as a dataset artifact; the same rows give the same bytes.

    images_from: folders with the image files named by the rows, which are copied. Returns the number of `images`, if
    any, for the metrics.
    Raises StageError if a row names a missing image file.
    """
    named: set[str] = set()

    def texts() -> Iterator[tuple[str, str]]:
        for row in rows:
            named.update(images_of_row(row))
            yield row["id"], row_text(row)

    write_rows(folder, texts())
    counted = {"images": len(named)} if named else {}
    copy_images(named, folder, images_from)
    write_info(folder, {**{name: value for name, value in info.items() if name != "images"}, **counted})
    return counted


def copy_images(digests: Collection[str], folder: Path, images_from: Sequence[Path]) -> None:
    """Copy the files of images, named by their SHA-256, to the artifact in `folder`. images_from: folders with them.

    Raises StageError if one is missing.
    """
    if digests:
        (folder / IMAGES_FOLDER).mkdir()
    for digest in sorted(digests):
        file = next((path for each in images_from if (path := each / digest).is_file()), None)
        if file is None:
            places = ", ".join(map(str, images_from)) or "any dataset"
            raise StageError(f"a row has the image {digest}, whose file is not in {places}")
        shutil.copyfile(file, folder / IMAGES_FOLDER / digest)


def write_rows(folder: Path, rows: Iterable[tuple[str, str]]) -> None:
    """Write rows. rows: the id of each, and its text."""
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("id", pa.string()), ("row", pa.json_())])
    with ArrowWriter(folder / DATA_FILE, schema) as writer:
        for row_id, text in rows:
            writer.append({"id": row_id, "row": text}, len(text))


def row_text(row: Mapping[str, Any]) -> str:
    """Return a canonical row as JSON, the form in dataset artifacts."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


def write_info(folder: Path, info: Mapping[str, Any]) -> None:
    (folder / INFO_FILE).write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
