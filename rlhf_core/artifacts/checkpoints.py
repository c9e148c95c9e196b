"""Checkpoints of an artifact that is still being computed. Each is complete or absent; a job resumes from the newest.

`<artifact>/checkpoints/<step>-<id>/…`: the files first, uploaded from the node that has them, `manifest.json` last.
Every attempt has its own id, so files left by a killed process never mix with those of another attempt.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import AwareDatetime, Field

from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import ArtifactRef, FileEntry, file_digest
from rlhf_core.artifacts.store import Store
from rlhf_core.config.base import Config
from rlhf_core.errors import IntegrityError

MANIFEST = "manifest.json"
_NAME = r"^[0-9]{12}-[0-9a-f]{12}$"
_FILE = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class CheckpointFile(FileEntry):
    path: str = Field(pattern=_FILE)  # a plain file name in the checkpoint's folder


class Checkpoint(Config):
    """The manifest of a checkpoint. Written last and once: its presence means that all files are there."""

    name: str = Field(pattern=_NAME)  # of the checkpoint's folder
    step: int  # the last step that was completed
    ranks: int = Field(ge=1)  # number of training ranks; each stores its own state
    replicas: int | None = None  # of the model, on these ranks; none: each rank is one
    files: tuple[CheckpointFile, ...]
    libraries: dict[str, str]
    created_at: AwareDatetime


class Checkpoints:
    """The checkpoints of one artifact. Only the holder of its lease commits and removes; any node adds and reads."""

    def __init__(self, store: Store, ref: ArtifactRef):
        self._store = store
        self._ref = ref
        self.resumed_after: int | None = None  # the step of the checkpoint that this job began with
        self.committed: list[int] = []  # the steps of those that it has written

    @staticmethod
    def new_name(step: int) -> str:
        """Return a folder name that sorts by step and is unique to this attempt."""
        return f"{step:012d}-{uuid.uuid4().hex[:12]}"

    def add(self, name: str, file: str, content: Path | bytes) -> CheckpointFile:
        """Upload a file of the checkpoint `name`, which is not committed yet."""
        path = self._path(name, file)
        if isinstance(content, bytes):
            self._store.put(path, content)
            return CheckpointFile(path=file, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        entry = CheckpointFile(path=file, size=content.stat().st_size, sha256=file_digest(content))
        self._store.put_file_if_absent(path, content)
        return entry

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make the checkpoint visible. All its files must have been added."""
        self._store.put_if_absent(self._path(checkpoint.name, MANIFEST), checkpoint.model_dump_json(indent=1).encode())
        self.committed.append(checkpoint.step)

    def newest(self) -> Iterator[Checkpoint | IntegrityError]:
        """Yield the complete checkpoints, newest first; in place of one with a damaged manifest, its IntegrityError."""
        for name in self._complete():
            try:
                yield self._manifest(name)
            except IntegrityError as error:
                yield error

    def newest_step(self) -> int | None:
        """Return the step to resume from; None if there is no checkpoint. Lists names, reads no manifest."""
        return next(map(_step, self._complete()), None)

    def read(self, checkpoint: Checkpoint, file: str) -> bytes:
        """Return the content of a small file. Raises IntegrityError if it is missing or damaged."""
        entry = self._entry(checkpoint, file)
        data = self._store.get(self._path(checkpoint.name, file))
        if data is None:
            raise IntegrityError(f"{self._url(checkpoint.name, file)} is gone")
        self._verify(checkpoint, entry, hashlib.sha256(data).hexdigest())
        return data

    def fetch(self, checkpoint: Checkpoint, file: str, to: Path) -> None:
        """Copy a file to `to`. Raises IntegrityError, leaving no file, if it is missing or damaged."""
        entry = self._entry(checkpoint, file)
        path = self._path(checkpoint.name, file)
        if not self._store.exists(path):
            raise IntegrityError(f"{self._url(checkpoint.name, file)} is gone")
        try:
            self._store.get_file(path, to)
            self._verify(checkpoint, entry, file_digest(to))
        except BaseException:
            to.unlink(missing_ok=True)
            raise

    def prune(self, newest: str, keep: int) -> None:
        """Keep `newest`, which is complete, and the `keep` - 1 complete checkpoints before it; remove all others.

        That includes incomplete ones, and those of the same or a later step: damaged, or this run would have resumed
        from them.
        """
        before = [name for name in self._complete() if _step(name) < _step(newest)]
        kept = {newest, *before[: keep - 1]}
        self._remove(name for name in self._names() if name not in kept)

    def clear(self) -> None:
        """Remove all checkpoints, incomplete ones too."""
        self._remove(self._names())

    def _remove(self, names: Iterator[str] | Sequence[str]) -> None:
        """Delete each manifest first: an interrupted removal then leaves no checkpoint that looks complete."""
        for name in names:
            paths = self._store.list(f"{self._root}/{name}/")
            for path in sorted(paths, key=lambda path: not path.endswith(f"/{MANIFEST}")):
                self._store.delete(path)

    def _complete(self) -> list[str]:
        """Return the names of the complete checkpoints, newest first; objects with other names are ignored."""
        paths = self._store.list(f"{self._root}/")
        names = (path.split("/")[-2] for path in paths if path.endswith(f"/{MANIFEST}"))
        return sorted((name for name in names if re.match(_NAME, name)), reverse=True)

    def _names(self) -> list[str]:
        paths = self._store.list(f"{self._root}/")
        return sorted({path.removeprefix(f"{self._root}/").split("/")[0] for path in paths})

    def _manifest(self, name: str) -> Checkpoint:
        where = self._url(name, MANIFEST)
        data = self._store.get(self._path(name, MANIFEST))
        if data is None:
            raise IntegrityError(f"{where} is gone")
        manifest = parsed(Checkpoint, data, where, "the manifest of a checkpoint")
        if manifest.name != name:
            raise IntegrityError(f"{where} is the manifest of {manifest.name}")
        return manifest

    def _entry(self, checkpoint: Checkpoint, file: str) -> CheckpointFile:
        for entry in checkpoint.files:
            if entry.path == file:
                return entry
        raise IntegrityError(f"the checkpoint {self._url(checkpoint.name, '')} has no file {file}")

    def _verify(self, checkpoint: Checkpoint, entry: CheckpointFile, digest: str) -> None:
        if digest != entry.sha256:
            raise IntegrityError(f"{self._url(checkpoint.name, entry.path)} is damaged: its content has another hash")

    @property
    def _root(self) -> str:
        return f"{self._ref.path}/checkpoints"

    def _path(self, name: str, file: str) -> str:
        return f"{self._root}/{name}/{file}"

    def _url(self, name: str, file: str) -> str:
        return f"{self._store.url}/{self._path(name, file)}"


def _step(name: str) -> int:
    return int(name.partition("-")[0])
