"""Artifacts in a store: blobs addressed by content hash, manifests that list them, and copies on this node."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from rlhf_core.artifacts.aliases import ALIASES, Alias, alias_path
from rlhf_core.artifacts.deletions import wait_for_deletions
from rlhf_core.artifacts.documents import parsed
from rlhf_core.artifacts.manifest import ArtifactRef, FileEntry, Manifest, file_digest
from rlhf_core.artifacts.node_cache import NodeCache
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.artifacts.store import Store, is_path
from rlhf_core.config.texts import is_model_name
from rlhf_core.errors import ConflictError, IntegrityError, StoreError, did_you_mean, one_line

UPLOADS = "uploads"
_PARALLEL_REQUESTS = 8
_REMEDY = "`alignment repair` takes it out of use, and the next run computes it again"
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Formats that can run code when they are read. Weights are stored as safetensors.
_PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})


class ArtifactRepository:
    def __init__(self, store: Store):
        self.store = store

    def manifest(self, ref: ArtifactRef) -> Manifest | None:
        """Return the artifact's manifest; None if it is absent or one of its blobs is missing."""
        stored = self._stored(ref)
        return stored[0] if stored is not None and self._is_whole(stored[0]) else None

    def publish(self, manifest: Manifest, folder: Path) -> Manifest:
        """`upload`, then `commit`."""
        return self.commit(self.upload(manifest, folder))

    def upload(self, manifest: Manifest, folder: Path) -> Manifest:
        """Store the files of `folder`. Returns `manifest` with these files, not stored yet.

        Raises StoreError for an empty folder and for a file that is a pickle.
        """
        paths = _files_below(folder)
        if not paths:
            raise StoreError(f"{manifest.name}: nothing to publish, {folder} has no files")
        for path in paths:
            if path.suffix in _PICKLES:
                raise StoreError(f"{manifest.name}: {path.name} may be a pickle; save weights as .safetensors")
        files = tuple(
            FileEntry(path=path, size=(folder / path).stat().st_size, sha256=digest)
            for path, digest in self.put_folder(folder, manifest.ref).items()
        )
        return manifest.model_copy(update={"files": files})

    def commit(self, manifest: Manifest) -> Manifest:
        """Store `manifest`, whose files are stored. Returns the stored one: another process's if that was first."""
        stored = self._commit(manifest)
        for path in self.store.list(uploads_prefix(manifest.ref)):  # the manifest names their blobs now
            self.store.delete(path)
        return stored

    def _commit(self, manifest: Manifest) -> Manifest:
        data = manifest.model_dump_json(indent=1).encode()
        while True:
            try:
                self.store.put_if_absent(manifest_path(manifest.ref), data)
                return manifest
            except ConflictError:
                pass
            stored = self._stored(manifest.ref)
            if stored is not None and self._is_whole(stored[0]):
                return stored[0]
            if stored is not None:
                # A manifest with missing blobs counts as absent.
                try:
                    self.store.replace(manifest_path(manifest.ref), data, stored[1])
                    return manifest
                except ConflictError:
                    pass

    def fetch(self, ref: ArtifactRef, cache: Path, only: Collection[str] | None = None) -> Path:
        """Return a folder on this node with the artifact's files, or those in `only`, their content verified.

        The files are read-only and shared. cache: a folder that all jobs of this node can share.
        Raises StoreError if the artifact or a blob is missing, IntegrityError if a blob does not match its hash.
        """
        stored = self._stored(ref)
        if stored is None:
            raise StoreError(f"{self.store.url} has no artifact {ref}")
        files = {file.path: file.sha256 for file in stored[0].files if only is None or file.path in only}
        return self.materialise(files, cache)

    def materialise(self, files: Mapping[str, str], cache: Path) -> Path:
        """Return a read-only folder on this node with the blobs `files`: relative path -> sha256."""
        for path, sha256 in files.items():
            _check_relative(path)
            blob_path(sha256)
        return NodeCache(cache).folder(files, self.get_blob)

    def put_folder(self, folder: Path, owner: ArtifactRef) -> dict[str, str]:
        """Store the files of `folder` as blobs. Returns relative path -> SHA-256, sorted by path.

        owner: the artifact whose job needs them. Until its manifest is there, a document of its uploads keeps a garbage
        collection from deleting those that were stored before.
        """
        paths = _files_below(folder)
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            digests = list(pool.map(file_digest, paths))
            document = f"{uploads_prefix(owner)}{uuid.uuid4().hex}.json"
            self.store.put(document, json.dumps({"blobs": sorted(set(digests))}).encode())
            wait_for_deletions(self.store, map(blob_path, digests))
            list(pool.map(self.store.put_file_if_absent, map(blob_path, digests), paths))
        return {path.relative_to(folder).as_posix(): digest for path, digest in zip(paths, digests, strict=True)}

    def get_folder(self, files: Mapping[str, str], folder: Path) -> None:
        """Write the blobs `files` (relative path -> SHA-256) to `folder`, verified. Raises as `get_blob` does."""
        for path in files:
            _check_relative(path)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            list(pool.map(lambda path: self.get_blob(files[path], folder / path), files))

    def put_blob(self, content: Path | bytes) -> str:
        """Store a file or bytes unless stored already. Returns their SHA-256, which addresses them.

        For a blob that a document in the store names already: else a garbage collection may delete it.
        """
        if isinstance(content, bytes):
            digest = hashlib.sha256(content).hexdigest()
            if not self.store.exists(blob_path(digest)):
                self.store.put(blob_path(digest), content)
            return digest
        digest = file_digest(content)
        self.store.put_file_if_absent(blob_path(digest), content)
        return digest

    def get_blob(self, sha256: str, to: Path) -> None:
        """Copy a blob to the file `to`. Raises IntegrityError, leaving no file, if it does not match its hash."""
        try:
            self.store.get_file(blob_path(sha256), to)
            actual = file_digest(to)
            if actual != sha256:
                raise IntegrityError(
                    f"{self.store.url}: the content of {blob_path(sha256)} has another hash, {actual}: it is "
                    "damaged; run `alignment repair`, and then the recipe again"
                )
        except BaseException:
            to.unlink(missing_ok=True)
            raise

    def write_spec(self, spec: StageSpec) -> None:
        """Store the spec of an artifact's job. The last write wins: all specs of a key compute the same artifact."""
        self.store.put(_spec_path(spec.ref), spec.model_dump_json(indent=1).encode())

    def has_spec(self, ref: ArtifactRef) -> bool:
        """Return False for an artifact that was not published by a job."""
        return self.store.exists(_spec_path(ref))

    def read_spec(self, ref: ArtifactRef) -> StageSpec:
        """Return the spec of an artifact's job. Raises StoreError if there is none."""
        path = _spec_path(ref)
        data = self.store.get(path)
        if data is None:
            raise StoreError(f"{self.store.url} has no {path}: a flow writes it before it starts the job")
        return parsed(StageSpec, data, f"{self.store.url}: {path}", "a stage's spec", _REMEDY)

    def list_artifacts(self, stage: str | None = None) -> Iterator[Manifest]:
        """Yield all manifests in the store, or those of a stage, sorted by stage and key. Does not check for their
        blobs.
        """
        refs = self.refs(stage)
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            for stored in pool.map(self._stored, refs):
                if stored is not None:
                    yield stored[0]

    def refs(self, stage: str | None = None) -> list[ArtifactRef]:
        """Return all artifacts that have a manifest, or those of a stage, readable or not, sorted by stage and key."""
        return self._refs("" if stage is None else f"{stage}/")

    def stored_manifest(self, ref: ArtifactRef) -> Manifest | None:
        """Return the manifest, also of an artifact whose blobs are missing. Raises IntegrityError if it is damaged."""
        stored = self._stored(ref)
        return None if stored is None else stored[0]

    def resolve(self, text: str) -> ArtifactRef:
        """Return the artifact named by `stage/digits of the key`, `model/alias`, or an alias that only one model has.

        Raises StoreError if the name is unknown or ambiguous.
        """
        candidates = self._candidates(text) if is_path(text.removesuffix("/")) else {}  # `sft/`: all of that stage
        if not candidates:
            near = did_you_mean(text, self._names())
            raise StoreError(
                f"{self.store.url} has no artifact or alias `{text}`{near}; `alignment artifacts` lists artifacts"
            )
        if len(candidates) > 1:
            raise StoreError(f"`{text}` is ambiguous: {', '.join(candidates.values())}; give more digits of the key")
        return next(iter(candidates))

    def _candidates(self, text: str) -> dict[ArtifactRef, str]:
        """Return the candidates for `text`, each with its description."""
        name, slash, rest = text.rpartition("/")
        candidates: dict[ArtifactRef, str] = {}
        for path in self._alias_paths(name, rest):
            data = self.store.get(path)
            if data is not None:
                candidates.setdefault(Alias.parse(path, data).manifest, f"the alias {path}")
        if slash:
            candidates |= {ref: f"the artifact {ref}" for ref in self._refs(text) if ref.stage == name}
        return candidates

    def find(self, text: str) -> Manifest:
        """Return the manifest of `resolve(text)`. Raises StoreError also if files of it are gone."""
        ref = self.resolve(text)
        manifest = self.manifest(ref)
        if manifest is None:
            raise StoreError(f"{ref} is in the store, but files of it are gone: run its recipe again")
        return manifest

    def _names(self) -> Iterator[str]:
        """Yield the names that `resolve` accepts."""
        for path in self.store.list(f"{ALIASES}/"):
            yield path.removeprefix(f"{ALIASES}/").removesuffix(".json")
        yield from map(str, self.refs())

    def _alias_paths(self, model: str, alias: str) -> Iterable[str]:
        if model:
            return [alias_path(model, alias)] if is_model_name(model) and is_model_name(alias) else []
        return [path for path in self.store.list(f"{ALIASES}/") if path.endswith(f"/{alias}.json")]

    def _refs(self, prefix: str) -> list[ArtifactRef]:
        """Return the artifacts below `prefix`; objects with other names than keys are ignored."""
        paths = (PurePosixPath(path).parts for path in self.store.list(f"stages/{prefix}"))
        names = [p[1:3] for p in paths if len(p) == 4 and p[3] == "manifest.json"]
        return [ArtifactRef(stage=stage, key=key) for stage, key in names if _SHA256.fullmatch(key)]

    def _stored(self, ref: ArtifactRef) -> tuple[Manifest, str] | None:
        """Return the stored manifest and its tag."""
        tagged = self.store.get_tagged(manifest_path(ref))
        if tagged is None:
            return None
        where = f"{self.store.url}: {manifest_path(ref)}"
        manifest = parsed(Manifest, tagged[0], where, "a manifest", _REMEDY)
        if (manifest.stage, manifest.key) != (ref.stage, ref.key):
            other = one_line(f"{manifest.stage}/{manifest.key[:12]}")
            raise IntegrityError(f"{where} is the manifest of {other}: {_REMEDY}")
        return manifest, tagged[1]

    def _is_whole(self, manifest: Manifest) -> bool:
        paths = {blob_path(file.sha256) for file in manifest.files}
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            return all(pool.map(self.store.exists, paths))


def blob_path(sha256: str) -> str:
    """Return the path of a blob. Raises IntegrityError for an invalid hash, which could be any path."""
    if not _SHA256.fullmatch(sha256):
        raise IntegrityError(f"`{sha256}` is not a SHA-256 in hexadecimal digits")
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def manifest_path(ref: ArtifactRef) -> str:
    return f"{ref.path}/manifest.json"


def uploads_prefix(ref: ArtifactRef) -> str:
    """Return the prefix of the documents that name blobs of an artifact whose manifest is not there yet.

    Outside its folder, since a garbage collection must read them before it lists manifests.
    """
    return f"{UPLOADS}/{ref.stage}/{ref.key}/"


def _spec_path(ref: ArtifactRef) -> str:
    return f"{ref.path}/spec.json"


def _check_relative(path: str) -> None:
    """Raise IntegrityError for a path outside the target folder: others can write manifests and specs to the store."""
    parts = PurePosixPath(path).parts
    if not parts or PurePosixPath(path).is_absolute() or ".." in parts:
        raise IntegrityError(f"the file `{path}` of an artifact would lead out of its folder")
