"""Data files as bytes: only regular files, decompressed by their suffix, and of the kind of their name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec

from rlhf_core.config.texts import is_unicode
from rlhf_core.data.formats import RowError
from rlhf_core.errors import reason_of
from rlhf_core.system.paths import file_problem

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".zip")
HEAD_BYTES = 2**16
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError)
# How files of other kinds begin, and what to do about them.
_OTHER_KINDS = (
    (b"\x1f\x8b", "is compressed by gzip: let its name end in .gz"),
    (b"BZh", "is compressed by bzip2: let its name end in .bz2"),
    (b"\xfd7zXZ\0", "is compressed by xz: let its name end in .xz"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd: let its name end in .zst"),
    (b"PK\x03\x04", "is a zip archive or a spreadsheet: let its name end in .zip, or save the sheet as .csv"),
    (b"PAR1", "is a parquet file: let its name end in .parquet"),
    (b"\xff\xfe\0\0", "is UTF-32 text: save it as UTF-8"),
    (b"\xff\xfe", "is UTF-16 text: save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text: save it as UTF-8"),
    (b"version https://git-lfs", "is a pointer of git-lfs, not the file: run `git lfs pull`"),
    (b"%PDF", "is a PDF, not data: extract its text"),
)
_MARKUP = (b"<!doctype", b"<html", b"<?xml")
_MOST_NUL = 0.1  # of the first bytes: UTF-16 of other than East Asian text has half, text has none


def name_problem(path: str) -> str | None:
    """Return the reason why no recipe, key or manifest can contain the path of a file; None if they can."""
    return None if is_unicode(path) else "its name is not UTF-8, as of an old archive or disk: rename it"


@contextmanager
def open_data(path: str, shown: str) -> Iterator[IO[bytes]]:
    """Open the content of the data file, decompressed.

    path: local or a URL; shown: its name in the recipe, whose suffix is the compression.
    Raises RowError, also where the body meets the end or the damage of a compressed file.
    """
    compression = compression_of(shown)
    remote = "://" in path
    problem = None if remote else file_problem(Path(path))
    if problem:
        raise RowError(f"{shown}: {problem}")
    try:
        with _remote(path, shown) if remote else Path(path).open("rb") as file:
            content = io.BufferedReader(file, HEAD_BYTES) if remote else file
            yield _OPENERS[compression](content, shown) if compression else content
    except FileNotFoundError as error:
        raise RowError(f"{shown}: there is no such file") from error
    except _DAMAGED as error:
        what = f"is cut off, damaged, or no {compression} file: copy it again" if compression else "cannot be read"
        raise RowError(f"{shown}: {what} ({type(error).__name__}: {reason_of(error)})") from error


def _remote(url: str, shown: str) -> Any:
    """Open for reading from beginning to end, which any server can send, unless the parts of the file are listed at its
    end.
    """
    parts = shown.lower().endswith((".parquet", ".zip")) or not url.startswith(("http://", "https://"))
    return fsspec.open(url, "rb", **({} if parts else {"block_size": 0}))


def compression_of(shown: str) -> str:
    """Return the suffix of the file's compression; empty if it has none."""
    suffix = PurePosixPath(shown).suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def read_head(path: str, shown: str) -> bytes:
    """Return the beginning of the decompressed file. Raises RowError for one of another kind than text."""
    with open_data(path, shown) as file:
        head = file.read(HEAD_BYTES)
    for begin, problem in _OTHER_KINDS:
        if head.startswith(begin):
            again = compression_of(shown) and problem.startswith("is compressed")
            raise _other_kind(shown, "is compressed once more: decompress it" if again else problem)
    if head.lstrip()[:16].lower().startswith(_MARKUP):
        raise _other_kind(shown, "is a web page or XML, not data: download the file itself")
    begin = head[:512]
    if begin.count(0) > _MOST_NUL * len(begin):
        raise _other_kind(
            shown,
            "is full of NUL, so it is not valid UTF-8 text: save UTF-16 as UTF-8, unpack archives, convert what is "
            "binary",
        )
    return head


def _other_kind(shown: str, problem: str) -> RowError:
    return RowError(f"{shown}: {'its content' if compression_of(shown) else 'the file'} {problem}")


class _Streams(io.RawIOBase):
    """Concatenated compressed streams, as parallel compressors write them, up to the end of the file.

    The readers of Python's library take a later stream that is damaged at its beginning for the end of the file.
    """

    def __init__(self, file: IO[bytes], decompressor: Callable[[], Any]) -> None:
        self._file = file
        self._decompressor = decompressor
        self._stream = decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            chunk = b""
            if self._stream.eof:
                chunk = self._next_stream()
                if not chunk:
                    return 0
                self._stream = self._decompressor()
            elif self._stream.needs_input:
                chunk = self._file.read(HEAD_BYTES)
                if not chunk:
                    raise EOFError("the file ends within a compressed stream")
            data = self._stream.decompress(chunk, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next_stream(self) -> bytes:
        """Return the beginning of the next stream; empty at the end of the file. NUL may separate streams."""
        data: bytes = self._stream.unused_data.lstrip(b"\0")
        while not data and (read := self._file.read(HEAD_BYTES)):
            data = read.lstrip(b"\0")
        return data


def _zstd(file: Any, shown: str) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))


def _zip(file: Any, shown: str) -> IO[bytes]:
    archive = zipfile.ZipFile(file)
    members = [member for member in archive.infolist() if not member.is_dir() and "__MACOSX" not in member.filename]
    if len(members) != 1:
        raise RowError(f"{shown}: the archive holds {len(members)} files, not one: unpack it and name them")
    if members[0].flag_bits & 1:
        raise RowError(f"{shown}: the archive is encrypted: unpack it")
    return archive.open(members[0])


_OPENERS: dict[str, Callable[[Any, str], Any]] = {
    ".gz": lambda file, shown: gzip.GzipFile(fileobj=file),
    ".bz2": lambda file, shown: io.BufferedReader(_Streams(file, bz2.BZ2Decompressor), HEAD_BYTES),
    ".xz": lambda file, shown: io.BufferedReader(_Streams(file, lzma.LZMADecompressor), HEAD_BYTES),
    ".zst": _zstd,
    ".zip": _zip,
}
