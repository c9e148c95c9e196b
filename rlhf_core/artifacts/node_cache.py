"""Blobs and folders of them on one node, shared by its jobs: each blob is transferred once, each folder linked once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock


class NodeCache:
    """`blobs/<digest>`, `folders/<digest of the list of files>/…`; what has its final name is whole."""

    def __init__(self, root: Path):
        self._root = root
        for name in ("blobs", "folders", "locks", "temporary"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def folder(self, files: Mapping[str, str], get_blob: Callable[[str, Path], None]) -> Path:
        """The folder with `files`, relative path -> sha256. Its files are read-only.

        get_blob(sha256, path) writes a verified blob into a new file; what it raises goes through.
        """
        digest = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()
        folder = self._root / "folders" / digest
        with self._lock(digest):
            if folder.is_dir():
                if all(self._is_good(folder / path, sha256) for path, sha256 in files.items()):
                    return folder
                shutil.rmtree(folder)
            building = Path(tempfile.mkdtemp(dir=self._root / "temporary"))
            try:
                for path, sha256 in files.items():
                    target = building / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _link(self._blob(sha256, get_blob), target)
                building.chmod(0o755)
                building.rename(folder)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
        return folder

    def _blob(self, sha256: str, get_blob: Callable[[str, Path], None]) -> Path:
        blob = self._root / "blobs" / sha256
        with self._lock(sha256):
            if not self._is_good(blob, sha256):
                handle, name = tempfile.mkstemp(dir=self._root / "temporary")
                os.close(handle)
                temporary = Path(name)
                try:
                    get_blob(sha256, temporary)
                    temporary.chmod(0o444)
                    # The size, so that a file cut short later is noticed without reading every byte at every use.
                    self._size_file(sha256).write_text(str(temporary.stat().st_size))
                    temporary.replace(blob)
                finally:
                    temporary.unlink(missing_ok=True)
        return blob

    def _is_good(self, file: Path, sha256: str) -> bool:
        try:
            return file.stat().st_size == int(self._size_file(sha256).read_text())
        except (FileNotFoundError, ValueError):
            return False

    def _size_file(self, sha256: str) -> Path:
        return self._root / "blobs" / f"{sha256}.size"

    def _lock(self, digest: str) -> FileLock:
        return FileLock(self._root / "locks" / digest)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links, or too many of them
        shutil.copyfile(source, target)
        target.chmod(0o444)
