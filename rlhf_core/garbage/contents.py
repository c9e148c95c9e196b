"""The content of a store, as far as a garbage collection has to know it: documents that name artifacts and blobs.

Read leniently, since other releases wrote some of them: fields that say nothing about needs may be anything.
A document that cannot be read ends the collection, because what it needs is not known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from pydantic import AwareDatetime, BaseModel, ValidationError

from rlhf_core.artifacts.documents import first_problem
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import UPLOADS
from rlhf_core.artifacts.store import Entry, Store
from rlhf_core.errors import IntegrityError

_PARALLEL_READS = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"stages/(?P<stage>[^/]+)/(?P<key>[0-9a-f]{64})/(?P<rest>.+)")
_UPLOADS = re.compile(rf"{UPLOADS}/(?P<stage>[^/]+)/(?P<key>[0-9a-f]{{64}})/[0-9a-f]{{32}}\.json")
_ATTEMPT = re.compile(r"(attempts|resources)/[^/]+\.json")
_CHECKPOINT = re.compile(r"checkpoints/[0-9]{12}-[0-9a-f]{12}/[^/]+")

Blobs = frozenset[bytes]  # by SHA-256
Parsed = TypeVar("Parsed")
Document = TypeVar("Document", bound=BaseModel)


class _File(BaseModel):
    sha256: str


class _Manifest(BaseModel):
    kind: str
    name: str
    files: list[_File]
    parents: dict[str, ArtifactRef]
    user_files: dict[str, str] = {}
    finished_at: AwareDatetime


class _Spec(BaseModel):
    inputs: dict[str, ArtifactRef]
    user_files: dict[str, str]
    run_id: str = ""


class _Uploads(BaseModel):
    blobs: list[str]


@dataclass(frozen=True, slots=True)
class Named:
    """Artifacts and blobs that a document in an artifact's folder names."""

    refs: tuple[ArtifactRef, ...]
    blobs: Blobs
    kind: str = ""  # of a manifest
    made: datetime | None = None  # likewise
    run_id: str = ""  # of a spec


@dataclass(slots=True)
class Folder:
    """An artifact's folder: the known objects in it, with those of its uploads, and what its documents name."""

    ref: ArtifactRef
    manifest: Named | None = None
    spec: Named | None = None
    uploads: list[Named] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)  # with the manifest, if there is one, first

    @property
    def blobs(self) -> Blobs:
        return Blobs().union(*(named.blobs for named in (self.manifest, self.spec, *self.uploads) if named is not None))

    @property
    def inputs(self) -> tuple[ArtifactRef, ...]:
        """Artifacts that it was made from, or is being made from."""
        return tuple(ref for named in (self.manifest, self.spec) if named is not None for ref in named.refs)

    @property
    def newest(self) -> datetime:
        return max(entry.modified for entry in self.entries)

    @property
    def leftovers(self) -> list[Entry]:
        """Objects that a job needs only until its manifest is there."""
        prefixes = (f"{self.ref.path}/checkpoints/", f"{self.ref.path}/live/", f"{UPLOADS}/")
        return [entry for entry in self.entries if entry.path.startswith(prefixes)]


class Documents:
    """Documents of a store, each read once per version."""

    def __init__(self, store: Store):
        self._store = store
        self._kept: dict[str, tuple[str, Any]] = {}

    def read(self, entries: Iterable[Entry], parse: Callable[[str, bytes], Parsed]) -> dict[str, Parsed]:
        """Return what `parse` makes of each document, by path; without those that are gone meanwhile."""
        entries = list(entries)
        changed = [e for e in entries if self._kept.get(e.path, ("", None))[0] != e.version]
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            for entry, parsed in pool.map(partial(self._read, parse), changed):
                self._kept[entry.path] = entry.version, parsed
        found = {entry.path: self._kept[entry.path][1] for entry in entries}
        return {path: parsed for path, parsed in found.items() if parsed is not None}

    def _read(self, parse: Callable[[str, bytes], Parsed], entry: Entry) -> tuple[Entry, Parsed | None]:
        data = self._store.get(entry.path)
        return entry, None if data is None else parse(entry.path, data)


def read_folders(store: Store, documents: Documents) -> dict[ArtifactRef, Folder]:
    """Return the folders of all artifacts, finished or not. Objects with unknown names are left out."""
    folders: dict[ArtifactRef, Folder] = {}

    def folder_of(match: re.Match[str]) -> Folder:
        ref = ArtifactRef(stage=match["stage"], key=match["key"])
        return folders.setdefault(ref, Folder(ref))

    # Uploads before manifests: those that a publisher removes meanwhile are named by a manifest that is listed below.
    uploads = [(match, entry) for entry in store.entries(f"{UPLOADS}/") if (match := _UPLOADS.fullmatch(entry.path))]
    named_by_path = documents.read((entry for _, entry in uploads), _uploads)
    for match, entry in uploads:
        if entry.path in named_by_path:
            folder = folder_of(match)
            folder.entries.append(entry)
            folder.uploads.append(named_by_path[entry.path])
    by_name: dict[str, list[tuple[Folder, Entry]]] = defaultdict(list)
    for entry in store.entries("stages/"):
        match = _FOLDER.fullmatch(entry.path)
        name = "" if match is None else _known(match["rest"])
        if match is None or not name:
            continue
        folder = folder_of(match)
        folder.entries.insert(0 if name == "manifest" else len(folder.entries), entry)
        by_name[name].append((folder, entry))
    for name, parse in (("manifest", _manifest), ("spec", _spec)):
        named_by_path = documents.read((entry for _, entry in by_name[name]), parse)
        for folder, entry in by_name[name]:
            if entry.path in named_by_path:
                setattr(folder, name, named_by_path[entry.path])
    return folders


def _known(rest: str) -> str:
    """Return the kind of an object by its path in an artifact's folder; empty for one that is not ours."""
    if rest in ("manifest.json", "spec.json"):
        return rest.removesuffix(".json")
    of_a_job = _CHECKPOINT.fullmatch(rest) or _ATTEMPT.fullmatch(rest) or rest.startswith(("live/", "logs/"))
    return "of a job" if of_a_job else ""


def parsed_leniently(kind: type[Document], path: str, data: bytes) -> Document:
    """Return the document. Raises IntegrityError, which says that nothing is deleted, if it is damaged."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(
            f"{path} cannot be read ({first_problem(error)}), so what it needs is not known, and nothing is deleted: "
            "`alignment repair` takes damaged manifests out of use; move another document away"
        ) from error


def _manifest(path: str, data: bytes) -> Named:
    manifest = parsed_leniently(_Manifest, path, data)
    blobs = [*(file.sha256 for file in manifest.files), *manifest.user_files.values()]
    return Named(tuple(manifest.parents.values()), _digests(path, blobs), manifest.kind, manifest.finished_at)


def _spec(path: str, data: bytes) -> Named:
    spec = parsed_leniently(_Spec, path, data)
    return Named(tuple(spec.inputs.values()), _digests(path, spec.user_files.values()), run_id=spec.run_id)


def _uploads(path: str, data: bytes) -> Named:
    return Named((), _digests(path, parsed_leniently(_Uploads, path, data).blobs))


def _digests(path: str, texts: Iterable[str]) -> Blobs:
    digests = list(texts)
    if wrong := [text for text in digests if not _SHA256.fullmatch(text)]:
        raise IntegrityError(
            f"{path} names `{wrong[0]}`, which is not a SHA-256, so nothing is deleted: repair it first"
        )
    return Blobs(map(bytes.fromhex, digests))
