"""Integrity of a store: hashes every blob and reads every manifest again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from rlhf_core.artifacts.documents import first_problem
from rlhf_core.artifacts.leases import holder_of
from rlhf_core.artifacts.manifest import ArtifactRef, Manifest, file_digest
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path, manifest_path
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.errors import IntegrityError, StoreError

BLOBS = "blobs/sha256/"
ASIDE = "damaged/"  # quarantine of a repair
_PARALLEL_READS = 8
MISSING = "is missing"
_WHOLE = "whole when it was read again: left as it is"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Damage:
    path: str  # of the object in the store
    what: str
    artifacts: tuple[ArtifactRef, ...]  # those that cannot be used because of it


@dataclass(slots=True)
class Verification:
    artifacts: int = 0
    blobs: int = 0
    num_bytes: int = 0
    damage: list[Damage] = field(default_factory=list)


Progress = Callable[[int, int, int], None]  # objects verified, of how many, and their bytes


def verify(
    repository: ArtifactRepository,
    refs: Collection[ArtifactRef] | None = None,
    *,
    progress: Progress = lambda done, total, num_bytes: None,
) -> Verification:
    """Check every blob of the artifacts `refs`, or of the whole store, in parallel and without keeping the bytes.

    Raises StoreError if the store fails, or one of `refs` is missing; damage is returned.
    """
    result = Verification()
    users: dict[str, set[ArtifactRef]] = defaultdict(set)
    sizes: dict[str, dict[int, ArtifactRef]] = defaultdict(dict)
    for ref in repository.refs() if refs is None else refs:
        result.artifacts += 1
        manifest, problem = _manifest(repository, ref)
        if problem:
            result.damage.append(Damage(manifest_path(ref), problem, (ref,)))
        for sha256, size in () if manifest is None else _blobs(manifest):
            users[sha256].add(ref)
            if size is not None:
                sizes[sha256][size] = ref
    # Blobs without a manifest count too: a stage with the same bytes would reuse the damaged ones.
    stored = set(_stored_blobs(repository)) if refs is None else set()
    total = len(stored | users.keys())
    with ThreadPoolExecutor(_PARALLEL_READS) as pool:
        hashed = pool.map(lambda sha256: (sha256, _hashed(repository, sha256)), sorted(stored | users.keys()))
        for sha256, content in hashed:
            result.blobs += 1
            result.num_bytes += content[1] if content else 0
            result.damage += _blob_damage(sha256, content, tuple(sorted(users[sha256], key=str)), sizes[sha256])
            progress(result.blobs, total, result.num_bytes)
    return result


@dataclass(frozen=True, slots=True)
class Repair:
    damage: Damage
    done: str


def repair(repository: ArtifactRepository, damage: Sequence[Damage], cache: Path) -> Iterator[Repair]:
    """Restore each damaged blob from the node's `cache` if it is there, and quarantine the others.

    An artifact whose blob is missing counts as absent, so the next run computes it again, and nothing else: the keys
    of its descendants depend on its key, not its bytes. Quarantined objects are kept below `damaged/`. The evidence is
    read again first: an object that is intact now stays.
    Raises StoreError if the store fails, or a job that computes one of the artifacts is running.
    """
    for item in damage:
        for ref in item.artifacts:
            if holder := holder_of(repository.store, ref):
                raise StoreError(f"{ref} is being computed by {holder}: repair when it has ended")
    for item in damage:
        yield Repair(item, _repair(repository, item, cache))


def _repair(repository: ArtifactRepository, item: Damage, cache: Path) -> str:
    store = repository.store
    if not item.path.startswith(BLOBS):
        again = verify(repository, item.artifacts).damage
        return _put_aside(repository, item.path) if item.path in {found.path for found in again} else _WHOLE
    sha256 = PurePosixPath(item.path).name
    now = _hashed(repository, sha256)
    if now is not None and now[0] == sha256:
        return _WHOLE
    kept = cache / "blobs" / sha256
    if kept.is_file() and file_digest(kept) == sha256:
        if now is not None:
            _put_aside(repository, item.path)
        store.put_file_if_absent(item.path, kept)
        restored = _hashed(repository, sha256)
        if restored is None or restored[0] != sha256:
            raise IntegrityError(f"{store.url}: {item.path} is damaged again after it was written: check the disks")
        return "put back from this node's cache"
    return "is missing: its stage will be computed again" if now is None else _put_aside(repository, item.path)


def _put_aside(repository: ArtifactRepository, path: str) -> str:
    target = f"{ASIDE}{path}"
    repository.store.move(path, target)
    return f"moved to {target}"


def _manifest(repository: ArtifactRepository, ref: ArtifactRef) -> tuple[Manifest | None, str]:
    """Return the manifest, if usable, and its damage."""
    try:
        manifest = repository.stored_manifest(ref)
    except IntegrityError as error:
        return None, _cause(error, "is not a manifest")
    if manifest is None and manifest_path(ref) in repository.store.list(manifest_path(ref)):
        return None, "is a link to a file that is not there"
    if manifest is None:
        raise StoreError(f"{repository.store.url} has no artifact {ref}: `alignment artifacts` lists them")
    try:
        for sha256, _ in _blobs(manifest):
            blob_path(sha256)
        spec = repository.read_spec(ref) if repository.has_spec(ref) else None
    except IntegrityError as error:
        return None, _cause(error, "its spec.json is not a spec")
    for name, value in () if spec is None else _spec_fields(spec):
        if getattr(manifest, name) != value:
            return None, f"its {name} is not that of its spec.json"
    return manifest, ""


def _spec_fields(spec: StageSpec) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a spec that its manifest repeats: the key's ingredients."""
    yield from (("key", spec.key), ("stage", spec.stage), ("config", spec.config), ("parents", spec.inputs))
    yield from (
        ("user_files", spec.user_files),
        ("pins", spec.pins),
        ("seed", spec.seed),
        ("rerun", spec.rerun),
        ("libraries", spec.libraries),
    )


def _cause(error: IntegrityError, what: str) -> str:
    if isinstance(error.__cause__, ValidationError):
        return f"{what} ({first_problem(error.__cause__)})"
    return str(error)


def _stored_blobs(repository: ArtifactRepository) -> Iterator[str]:
    for path in repository.store.list(BLOBS):
        name = PurePosixPath(path).name
        if path == f"{BLOBS}{name[:2]}/{name}" and _SHA256.fullmatch(name):
            yield name


def _blobs(manifest: Manifest) -> Iterator[tuple[str, int | None]]:
    """Yield the blobs of the artifact with their sizes, and those of the user files that were used to make it."""
    yield from ((file.sha256, file.size) for file in manifest.files)
    yield from ((sha256, None) for sha256 in manifest.user_files.values())


def _hashed(repository: ArtifactRepository, sha256: str) -> tuple[str, int] | None:
    try:
        return repository.store.hashed(f"{BLOBS}{sha256[:2]}/{sha256}")
    except IntegrityError:  # it is no file
        return "", 0


def _blob_damage(
    sha256: str, content: tuple[str, int] | None, users: tuple[ArtifactRef, ...], sizes: Mapping[int, ArtifactRef]
) -> Iterator[Damage]:
    path = f"{BLOBS}{sha256[:2]}/{sha256}"
    if content is None and not sizes:
        return  # a user's file, which the next run that needs it stores again
    if content is None:
        yield Damage(path, MISSING, users)
    elif content[0] != sha256:
        expected = next(iter(sizes), content[1])
        how = "other content" if content[1] == expected else f"{content[1]} of {expected} bytes"
        yield Damage(path, how, users)
    else:
        for size, ref in sizes.items():
            if size != content[1]:
                yield Damage(manifest_path(ref), f"says {size} bytes of a file that has {content[1]}", (ref,))
