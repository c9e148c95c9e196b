"""Artifacts in a store: blobs by content, manifests written last and once."""

from __future__ import annotations

import hashlib
import re
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from rlhf_core.artifacts.manifest import ArtifactRef, FileEntry, Manifest
from rlhf_core.artifacts.node_cache import NodeCache
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError, IntegrityError, StoreError
from rlhf_core.stages.contract import StageSpec


class ArtifactRepository:
    def __init__(self, store: Store) -> None:
        self.store = store

    def manifest(self, ref: ArtifactRef) -> Manifest | None:
        """The manifest of a finished stage; None if it has none yet, or if a blob that it names is gone."""
        manifest = self._read(f"{ref.path}/manifest.json")
        if manifest is None or not all(self.store.exists(blob_path(file.sha256)) for file in manifest.files):
            return None
        return manifest

    def _read(self, path: str) -> Manifest | None:
        data = self.store.get(path)
        if data is None:
            return None
        try:
            return Manifest.model_validate_json(data)
        except ValidationError as error:
            raise IntegrityError(f"{self.store.url}/{path} is not a manifest of this version: {error}") from error

    def publish(self, manifest: Manifest, folder: Path) -> Manifest:
        """Upload the files of `folder`, then commit `manifest` with them; whoever was first is returned.

        manifest.files is filled in here. The manifest in the store, which is the result, may be another's.
        """
        files = tuple(self._upload(path, folder) for path in sorted(folder.rglob("*")) if path.is_file())
        complete = manifest.model_copy(update={"files": files})
        path = f"{complete.ref.path}/manifest.json"
        try:
            self.store.put_if_absent(path, complete.model_dump_json(indent=1).encode())
        except ConflictError:
            return self._adopt(complete, path)
        return complete

    def _adopt(self, ours: Manifest, path: str) -> Manifest:
        winner = self.manifest(ours.ref)
        if winner is not None:
            return winner
        # The manifest that is there lost its blobs: it is no result, and ours takes its place.
        read = self.store.get_tagged(path)
        if read is None:
            raise StoreError(f"{self.store.url}/{path} was deleted while it was being published; run the stage again")
        self.store.replace(path, ours.model_dump_json(indent=1).encode(), read[1])
        return ours

    def _upload(self, path: Path, folder: Path) -> FileEntry:
        return FileEntry(
            path=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=self.put_blob(path)
        )

    def put_blob(self, content: Path | bytes) -> str:
        """Store `content` under its SHA-256 (hex), unless it is there already; returns the digest."""
        if isinstance(content, bytes):
            digest = hashlib.sha256(content).hexdigest()
            try:
                self.store.put_if_absent(blob_path(digest), content)
            except ConflictError:
                pass  # the same bytes: that is what the name says
            return digest
        digest = file_digest(content)
        self.store.put_file_if_absent(blob_path(digest), content)
        return digest

    def get_blob(self, digest: str, to: Path) -> None:
        """Download a blob to `to`, whole and verified, or not at all. Raises IntegrityError if the bytes are others."""
        to.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=to.parent, prefix=".incoming-")
        os.close(handle)
        incoming = Path(name)
        try:
            self.store.get_file(blob_path(digest), incoming)
            if file_digest(incoming) != digest:
                raise IntegrityError(f"{self.store.url}/{blob_path(digest)}: the bytes there have another digest")
            incoming.replace(to)
        finally:
            incoming.unlink(missing_ok=True)

    def fetch(self, ref: ArtifactRef, cache: Path, only: Collection[str] | None = None) -> Path:
        """A local folder with the artifact's files (or those named in `only`), verified, read-only.

        cache: a folder of this node that processes share; a blob is downloaded once however many artifacts have it.
        Raises StoreError if the artifact is not there.
        """
        manifest = self.manifest(ref)
        if manifest is None:
            raise StoreError(f"{ref} is not in {self.store.url}")
        files = {_inside(f.path).as_posix(): f.sha256 for f in manifest.files if only is None or f.path in only}
        return NodeCache(cache).folder(files, self.get_blob)

    def write_spec(self, spec: StageSpec) -> None:
        self.store.put(f"{spec.ref.path}/spec.json", spec.model_dump_json(indent=1).encode())

    def read_spec(self, ref: ArtifactRef) -> StageSpec:
        data = self.store.get(f"{ref.path}/spec.json")
        if data is None:
            raise StoreError(f"{self.store.url}/{ref.path}/spec.json is not there; a job is started by a flow, which writes it")
        return StageSpec.model_validate_json(data)

    def list_artifacts(self) -> Iterator[Manifest]:
        """Every manifest in the store, in any order."""
        for path in self.store.list("stages"):
            if path.endswith("/manifest.json") and path.count("/") == 3:
                manifest = self._read(path)
                if manifest is not None:
                    yield manifest

    def resolve(self, text: str) -> ArtifactRef:
        """The artifact that a person means by `stage/keyprefix`. Raises StoreError if none, or several, fit."""
        stage, slash, prefix = text.partition("/")
        if not slash or not prefix:
            raise StoreError(f"`{text}`: name an artifact as stage/key; the first letters of the key are enough")
        found = [m.ref for m in self.list_artifacts() if m.stage == stage and m.key.startswith(prefix)]
        if len(found) != 1:
            raise StoreError(f"`{text}`: {len(found) or 'no'} artifacts fit; `alignment artifacts` lists them")
        return found[0]


def blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest[:2]}/{digest}"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _inside(path: str) -> PurePosixPath:
    """`path`, if it stays inside the artifact's folder: manifests are data, and data is not trusted."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts:
        raise IntegrityError(f"a manifest names the file {path!r}, which lies outside its artifact")
    return relative
