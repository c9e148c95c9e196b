"""Damage in a store, found by reading everything again; and what repairing does with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.artifacts.leases import lease_path, take_lease
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path, manifest_path
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.artifacts.verification import repair, verify
from rlhf_core.errors import StoreError
from tests.rlhf_core.artifacts.manifests import published

pytestmark = pytest.mark.parts


def damaged(repository: ArtifactRepository) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(d.path, d.what, tuple(map(str, d.artifacts))) for d in verify(repository).damage]


def blob(stored: Manifest) -> str:
    return blob_path(stored.files[0].sha256)


def test_each_kind_of_damage_is_named_and_the_next_run_computes_just_that_again(
    repository: ArtifactRepository, tmp_path: Path
) -> None:
    names = ("whole", "flipped", "cut", "missing", "unreadable", "moved")
    made = {name: published(repository, tmp_path / name, name) for name in names}
    child = published(repository, tmp_path / "child", "child", parents={"model": made["flipped"].ref})
    seen: list[tuple[int, int, int]] = []
    found = verify(repository, progress=lambda *counts: seen.append(counts))
    assert (found.artifacts, found.blobs, found.num_bytes, found.damage) == (7, 7, 42, [])
    assert seen[-1] == (7, 7, 42)

    store = repository.store
    store.put(blob(made["flipped"]), b"flippee")
    store.put(blob(made["cut"]), b"cu")
    store.delete(blob(made["missing"]))
    store.put(manifest_path(made["unreadable"].ref), b"{")
    store.put(manifest_path(made["moved"].ref), made["whole"].model_dump_json().encode())
    expected = {
        blob(made["flipped"]): ("other content", (str(made["flipped"].ref),)),
        blob(made["cut"]): ("2 of 3 bytes", (str(made["cut"].ref),)),
        blob(made["missing"]): ("is missing", (str(made["missing"].ref),)),
    }
    said = {path: (what, refs) for path, what, refs in damaged(repository)}
    assert {path: said.pop(path) for path in expected} == expected
    [unreadable, moved] = (said.pop(manifest_path(made[name].ref))[0] for name in ("unreadable", "moved"))
    assert (unreadable.startswith("is not a manifest (JSON: "), "is the manifest of sft/" in moved, said) == (
        True,
        True,
        {},
    )
    assert [d.path for d in verify(repository, [made["cut"].ref, child.ref]).damage] == [blob(made["cut"])]

    done = {r.damage.path: r.done for r in repair(repository, verify(repository).damage, tmp_path / "cache")}
    assert done[blob(made["flipped"])] == f"moved to damaged/{blob(made['flipped'])}"
    assert done[blob(made["missing"])] == "is missing: its stage will be computed again"
    assert store.get(f"damaged/{blob(made['flipped'])}") == b"flippee"
    assert {m.name for m in made.values() if repository.manifest(m.ref) is None} == {*names} - {"whole"}
    assert repository.manifest(child.ref) == child
    for name in names:
        published(repository, tmp_path / f"{name} again", name)
    assert damaged(repository) == []
    assert {m.name for m in repository.list_artifacts()} == {*names, "child"}


def test_a_blob_is_put_back_from_the_cache_of_the_node(repository: ArtifactRepository, tmp_path: Path) -> None:
    stored = published(repository, tmp_path / "made", "one")
    cache = tmp_path / "cache"
    repository.fetch(stored.ref, cache)
    repository.store.put(blob(stored), b"oni")
    [done] = repair(repository, verify(repository).damage, cache)
    assert (done.done, damaged(repository)) == ("put back from this node's cache", [])
    assert repository.manifest(stored.ref) == stored

    kept = cache / "blobs" / stored.files[0].sha256
    kept.chmod(0o644)
    kept.write_bytes(b"onj")
    repository.store.put(blob(stored), b"oni")
    [done] = repair(repository, verify(repository).damage, cache)
    assert done.done == f"moved to damaged/{blob(stored)}"


def test_what_is_whole_when_it_is_read_again_stays(local: ArtifactRepository, tmp_path: Path) -> None:
    stored, other = published(local, tmp_path / "a", "one"), published(local, tmp_path / "b", "two")
    local.store.put(blob(stored), b"oni")
    local.store.put(manifest_path(other.ref), b"{")
    damage = verify(local).damage
    local.store.put(blob(stored), b"one")
    local.store.put(manifest_path(other.ref), other.model_dump_json().encode())
    assert {r.done for r in repair(local, damage, tmp_path)} == {"whole when it was read again: left as it is"}
    assert (local.manifest(stored.ref), local.manifest(other.ref)) == (stored, other)


def test_nothing_is_repaired_under_a_running_job(local: ArtifactRepository, tmp_path: Path) -> None:
    stored = published(local, tmp_path / "a", "one")
    local.store.put(blob(stored), b"oni")
    take_lease(local.store, lease_path(stored.ref))
    with pytest.raises(StoreError, match=f"{stored.ref} is being computed by process .*: repair when it has ended"):
        list(repair(local, verify(local).damage, tmp_path))
    assert local.store.get(blob(stored)) == b"oni"


def test_a_manifest_must_say_what_its_spec_asked_for(local: ArtifactRepository, tmp_path: Path) -> None:
    stored = published(local, tmp_path / "a", "one")
    spec = StageSpec(
        name="one", stage="sft", stage_version=1, key=stored.key, config=stored.config, inputs={}, user_files={},
        seed=3, libraries=stored.libraries,
    )  # fmt: skip
    local.write_spec(spec)
    assert damaged(local) == []
    text = stored.model_dump_json().replace('"seed":3', '"seed":7')
    local.store.put(manifest_path(stored.ref), text.encode())
    assert damaged(local) == [(manifest_path(stored.ref), "its seed is not that of its spec.json", (str(stored.ref),))]
    content = json.loads(stored.model_dump_json())
    content["files"][0]["size"] = 9
    local.store.put(manifest_path(stored.ref), json.dumps(content).encode())
    assert damaged(local) == [(manifest_path(stored.ref), "says 9 bytes of a file that has 3", (str(stored.ref),))]


def test_a_damaged_blob_that_no_manifest_names_is_found_too(local: ArtifactRepository) -> None:
    """A stage that makes these bytes would find them stored already."""
    digest = local.put_blob(b"user's file")
    local.store.put(blob_path(digest), b"user's filf")
    assert damaged(local) == [(blob_path(digest), "other content", ())]
