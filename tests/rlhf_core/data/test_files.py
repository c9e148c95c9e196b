from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rlhf_core.data.files import iterate_file
from rlhf_core.data.formats import RowError

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": 'b\n,"c"', "answer": "007"}]


def write(path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".jsonl":
        path.write_text("\ufeff" + lines + "\n", encoding="utf-8")
    elif path.name == "lines.json":
        path.write_text(lines)
    elif path.suffix == ".json":
        path.write_text(" \n" + json.dumps(ROWS, indent=1))
    elif path.suffix == ".csv":
        path.write_text('prompt,answer\na,1\n"b\n,""c""",007\n')
    else:
        parquet.write_table(pa.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.json", "lines.json", "d.csv", "d.parquet"])
def test_every_type_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    assert [row for _, row in iterate_file(str(tmp_path / name), name)] == ROWS


def test_the_recipes_name_decides_the_type_and_places_are_named(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl.gz")
    (tmp_path / "d.jsonl.gz").rename(tmp_path / "blob")
    places = [where for where, _ in iterate_file(str(tmp_path / "blob"), "data/d.jsonl.gz")]
    assert places == ["data/d.jsonl.gz line 1", "data/d.jsonl.gz line 2"]


def test_urls_are_read_through_fsspec() -> None:
    with fsspec.open("memory://bucket/d.jsonl", "wb") as file:
        file.write(b'{"text": "x"}\n')
    assert list(iterate_file("memory://bucket/d.jsonl", "memory://bucket/d.jsonl")) == [
        ("memory://bucket/d.jsonl line 1", {"text": "x"})
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"a": 1}\n{"a": \n', "d.jsonl line 2: not JSON (Expecting value"),
        ("d.jsonl", b'{"a": 1}\n[1]\n', "d.jsonl line 2: a row must be a JSON object, this is list"),
        ("d.json", b'[{"a": 1},\n{"a" 2}]', "d.json line 2: not JSON (Expecting ':' delimiter"),
        ("d.json", b"hello", "d.json line 1: not JSON"),
        ("d.jsonl", b"", "d.jsonl: the file has no rows"),
        ("d.json", b"", "d.json: the file has no rows"),
        ("d.json", b"[]", "d.json: the file has no rows"),
        ("d.csv", b"", "d.csv: the file has no rows"),
        ("d.csv", b"a,b\n", "d.csv: the file has no rows"),
        ("d.csv", b"a,b\n1,2\n3\n", "d.csv line 3: has not as many values as the header has columns"),
        ("d.parquet", b"hello", "d.parquet: not a parquet file"),
        ("d.jsonl", b"\xff\xfe", "d.jsonl line 1: not UTF-8 text"),
        ("d.csv", b"a,b\n1,2\n\xff,4\n", "d.csv: not UTF-8 text"),
        ("d.csv", b"a,b\n" + b"1,2\n" * 10_000 + b"\xff,4\n", "d.csv: not UTF-8 text"),
        ("d.csv", b'a,b\n1,2\n"3,4\n5,6\n', "d.csv line 4: not CSV (unexpected end of data)"),
        ("d.txt", b"hello", "d.txt: files must end in .json, .jsonl, .csv, .parquet"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RowError) as raised:
        list(iterate_file(str(tmp_path / name), name))
    assert message in str(raised.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RowError, match=r"^d\.jsonl: there is no such file$"):
        list(iterate_file(str(tmp_path / "d.jsonl"), "d.jsonl"))
