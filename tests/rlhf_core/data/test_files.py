from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rlhf_core.data.formats import RowError
from rlhf_core.data.sources.files import Budget, iterate_file

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": 'b\n,"c"', "answer": "007"}]


def write(path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.name == "d.jsonl":
        path.write_text("\ufeff" + lines.replace("\n", "\r\n \r\n"), encoding="utf-8")
    elif path.name == "list.jsonl":
        path.write_text("\ufeff" + json.dumps(ROWS), encoding="utf-8")
    elif path.suffix == ".tsv":
        path.write_text('prompt\tanswer\r\na\t1\r\n\r\n"b\n,""c"""\t007\r\n', newline="")
    elif path.name == "lines.json":
        path.write_text(lines)
    elif path.name == "pretty.jsonl":
        path.write_text("\n".join(json.dumps(row, indent=1) for row in ROWS))
    elif path.suffix == ".json":
        path.write_text(" \n" + json.dumps(ROWS, indent=1))
    elif path.suffix == ".csv":
        path.write_text('prompt,answer\na,1\n"b\n,""c""",007\n')
    else:
        parquet.write_table(pa.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    "name",
    ["d.jsonl", "list.jsonl", "pretty.jsonl", "d.jsonl.gz", "d.json", "lines.json", "d.csv", "d.tsv", "d.parquet"],
)
def test_every_type_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    assert [row for _, row in iterate_file(str(tmp_path / name), name)] == ROWS


def test_what_arrow_adds_to_mappings_is_not_in_a_row(tmp_path: Path) -> None:
    calls = [
        [{"name": "add", "arguments": {"a": 1}}],
        [{"name": "find", "arguments": {"word": "x", "deep": [{"y": 1}, {"z": 2}]}}],
    ]
    parquet.write_table(pa.Table.from_pylist([{"calls": c, "answer": a} for c, a in zip(calls, "1\0", strict=True)]),
                        tmp_path / "d.parquet")  # fmt: skip
    rows = [row for _, row in iterate_file(str(tmp_path / "d.parquet"), "d.parquet")]
    assert [row["calls"] for row in rows] == calls
    parquet.write_table(pa.table({"answer": pa.array([None], pa.string())}), tmp_path / "d.parquet")
    assert [row for _, row in iterate_file(str(tmp_path / "d.parquet"), "d.parquet")] == [{"answer": None}]


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
        ("d.jsonl", b"\xff\xff", "d.jsonl line 1: not UTF-8 text"),
        ("d.csv", b"a,b\n1,2\n\xff,4\n", "d.csv line 3: not UTF-8 text"),
        ("d.csv", b"a,b\n" + b"1,2\n" * 10_000 + b"\xff,4\n", "d.csv line 10002: not UTF-8 text"),
        (
            "d.csv",
            b'a,b\n1,2\n"3,4\n5,6\n',
            "d.csv line 3: not CSV (unexpected end of data): is a quote left open here?",
        ),
        ("d.txt", b"hello", "d.txt: files must end in .json, .jsonl, .csv, .tsv, .parquet"),
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


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


def zipped(content: bytes, *names: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in names or ("d.jsonl",):
            archive.writestr(name, content)
    return made.getvalue()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd, ".zip": zipped,
}  # fmt: skip
LINES = "".join(json.dumps({"text": f"{i} {i * i * 7919}"}) + "\n" for i in range(5000)).encode()


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_files(tmp_path: Path, ending: str) -> None:
    path, content = tmp_path / f"d.jsonl{ending}", COMPRESS[ending](LINES)
    path.write_bytes(content)
    assert len(list(iterate_file(str(path), path.name))) == 5000
    for broken in (content[: len(content) // 2], content[:7], LINES):
        path.write_bytes(broken)
        with pytest.raises(RowError, match=rf"^d\.jsonl\{ending}: is cut off, damaged, or no \{ending} file: copy it"):
            list(iterate_file(str(path), path.name))
    if ending != ".zip":
        path.write_bytes(content * 2)
        assert len(list(iterate_file(str(path), path.name))) == 10_000


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_no_stream_is_left_out(tmp_path: Path, ending: str) -> None:
    """Parallel compressors write many; NUL may follow, anything else is damage."""
    path, stream = tmp_path / f"d.jsonl{ending}", COMPRESS[ending](LINES)
    path.write_bytes(stream * 3 + b"\0" * 200_000)
    assert len(list(iterate_file(str(path), path.name))) == 15_000
    for broken in (stream + b"?" + stream[1:], stream + stream[:-5], stream + b"more"):
        path.write_bytes(broken)
        with pytest.raises(RowError, match="is cut off, damaged, or no"):
            list(iterate_file(str(path), path.name))


def test_a_time_zone_that_nothing_knows(tmp_path: Path) -> None:
    table = pa.table({"a": ["x"], "when": pa.array([1], pa.timestamp("us", tz="Mars/Olympus"))})
    parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(RowError, match=r"^d\.parquet rows 0 to 0: a value cannot be converted to Python"):
        list(iterate_file(str(tmp_path / "d.parquet"), "d.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", gzip.compress(LINES, mtime=0), "d.jsonl: the file is compressed by gzip: let its name end in .gz"),
        ("d.csv", zstd(LINES), "d.csv: the file is compressed by zstd: let its name end in .zst"),
        ("d.json", b"PAR1 and more", "d.json: the file is a parquet file: let its name end in .parquet"),
        ("d.jsonl", '{"a": 1}'.encode("utf-16"), "d.jsonl: the file is UTF-16 text: save it as UTF-8"),
        ("d.jsonl", '{"a": 1}'.encode("utf-32"), "d.jsonl: the file is UTF-32 text: save it as UTF-8"),
        ("d.jsonl.gz", gzip.compress('{"a": 1}'.encode("utf-16"), mtime=0), "d.jsonl.gz: its content is UTF-16 text"),
        ("d.jsonl.gz", gzip.compress(gzip.compress(LINES)), "d.jsonl.gz: its content is compressed once more: dec"),
        ("d.parquet.gz", b"", "d.parquet.gz: parquet is compressed inside of the file: unpack it"),
        ("d.jsonl.zip", zipped(LINES, "a", "b"), "d.jsonl.zip: the archive holds 2 files, not one: unpack it"),
        ("d.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "d.jsonl: the file is a pointer of git-lfs"),
        ("d.json", b'[{"a": 1}, {"a": 2},]', "d.json line 1: not JSON (Expecting value, column 21: ']'): a comma"),
        ("d.json", b'[{"a": 1}\n {"a": 2}]', "d.json line 2: not JSON (Expecting ',', column 2: '{"),
        ("d.json", b'[{"a": 1},\n{"a": "x', "d.json line 2: not JSON (Unterminated string starting at, column 7): is"),
        ("d.json", b'[{"a": 1}]\n3', "d.json line 2: not JSON (more text after the end of the list, column 1: '3')"),
        ("d.json", b'[{"a":\n"\xff"}]', "d.json line 2: not UTF-8 text (invalid start byte)"),
        ("d.json", b'{\n"a": 1\n}\n{\n"a" 2}', "d.json line 5: not JSON (Expecting ':' delimiter, column 5: '2}')"),
        ("d.json", b"[" * 100_000, "d.json line 1: not JSON that can be read: thousands of lists inside each other"),
        ("d.jsonl", b'{"a": ' * 9999, "d.jsonl line 1: not JSON that can be read: thousands of lists inside"),
        ("d.json", b'[{"a": ' + b"9" * 5000 + b"}]", "d.json line 1: not JSON that can be read: a number of thousands"),
        ("d.jsonl", b'{"a": NaN}', "d.jsonl line 1: NaN is not valid JSON: write a number, or null"),
        ("d.json", b'[{"a": 1}, {"a": -Infinity}]', "d.json row 1: -Infinity is not valid JSON: write a number, or"),
        ("d.jsonl", b'{"a": {"b": 1, "b": 1}}', "d.jsonl line 1: the key `b` occurs twice in one object"),
        ("d.jsonl", b'{"a": 1} {"a": 2}', "d.jsonl line 1: not JSON (more text after its end, column 9: '{"),
        ("d.jsonl", b'{"a": 1}\r{"a": 2}\r', "d.jsonl line 1: not JSON (more text after its end, column 9: '\\r')"),
        ("d.jsonl", b"{'a': 1}", "d.jsonl line 1: not JSON (Expecting property name enclosed in double quotes, col"),
        ("d.jsonl", b'\xef\xbb\xbf\xef\xbb\xbf{}', "d.jsonl line 1: not JSON (Expecting value, column 1: '\\ufeff{}')"),
        ("d.jsonl", '{"a": 1}'.encode("utf-16-le"), "d.jsonl: the file is full of NUL, so it is not valid UTF-8"),
        ("d.csv", "a,b\n".encode("utf-16-be"), "d.csv: the file is full of NUL, so it is not valid UTF-8 text: save"),
        ("d.jsonl", b"\n<!doctype HTML><html>", "d.jsonl: the file is a web page or XML, not data"),
        ("d.jsonl", b"<?xml version='1.0'?><Error>", "d.jsonl: the file is a web page or XML, not data"),
        ("d.json", b"%PDF-1.7", "d.json: the file is a PDF, not data"),
        ("d.csv", b"a;b\n1;2\n", "d.csv line 1: the header is one column, 'a;b': divide values by commas"),
        ("d.csv", b'"a";"b"\n1;2\n', "d.csv line 1: divide values by commas, in .tsv by tabs, not ';'"),
        ("d.tsv", b"a,b\n1,2\n", "d.tsv line 1: the header is one column, 'a,b': divide values by commas, in"),
        ("d.csv", b'{"a": 1}\n', "d.csv line 1: the file holds JSON: let its name end in .jsonl"),
        ("d.csv", b"a,b,a\n1,2,3\n", "d.csv line 1: the header names the column `a` twice: rename one of them"),
        ("d.csv", b"a,\xff\n1,2\n", "d.csv line 1: not UTF-8 text"),
        ("d.csv", b'a,b\n1,"x\ny"\n1,2,3\n', "d.csv line 4: has not as many values as the header has columns (3,"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_or_damaged_says_how(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RowError) as raised:
        list(iterate_file(str(tmp_path / name), name))
    assert str(raised.value).startswith(message)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "circle.jsonl").symlink_to("circle.jsonl")
    (tmp_path / "device.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in (
        ("pipe.jsonl", "is a named pipe, not a file: write its content to a file"),
        ("circle.jsonl", "cannot be read (Too many levels of symbolic links)"),
        ("device.jsonl", "is a device, not a file"),
        ("folder.jsonl", "is a folder, not a file"),
        ("x" * 300 + ".jsonl", "cannot be read (File name too long)"),
    ):
        with pytest.raises(RowError) as raised:
            list(iterate_file(str(tmp_path / name), name))
        assert str(raised.value) == f"{name}: {message}"


def test_rows_of_any_size_and_files_read_in_part(tmp_path: Path) -> None:
    """A value is longer than what csv takes by default, and than what is read at once."""
    long = "x" * 200_000
    (tmp_path / "d.csv").write_text(f'a,b\n"{long}",2\n')
    assert [row for _, row in iterate_file(str(tmp_path / "d.csv"), "d.csv")] == [{"a": long, "b": "2"}]
    rows = [{"a": long, "b": [{"c": "é" * 70_000}] * 3}, {"a": "1"}] * 3
    (tmp_path / "d.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    assert [row for _, row in iterate_file(str(tmp_path / "d.json"), "d.json")] == rows
    for name in ("d.json", "d.jsonl", "d.csv", "d.parquet"):
        rows = [{"a": str(i)} for i in range(1000)]
        lines = "\n".join(map(json.dumps, rows))
        if name == "d.parquet":
            parquet.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        else:
            (tmp_path / name).write_text({"d.json": json.dumps(rows), "d.jsonl": lines}.get(name, "a\n" + "1\n" * 1000))
        read = list(iterate_file(str(tmp_path / name), name, budget=Budget(1)))
        assert len(read) <= 1


def test_bad_rows_are_told_one_by_one_where_the_file_can_be_divided(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b"a,b\n1,2\n\xff,1\n3\n4,5\n")
    (tmp_path / "d.json").write_text('[{"a": 1}, {"a": NaN}, 3, {"a": 1, "a": 2}, {"a": 4}]')
    for name, places in (("d.csv", ["line 3", "line 4"]), ("d.json", ["row 1", "row 2", "row 3"])):
        told: list[str] = []
        rows = list(iterate_file(str(tmp_path / name), name, lambda where, error, told=told: told.append(where)))
        assert (len(rows), told) == (2, [f"{name} {place}" for place in places])
