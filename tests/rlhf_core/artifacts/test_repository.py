"""Artifacts: published once, whole or not there, verified where they arrive."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_core.artifacts.manifest import ArtifactRef, FileEntry
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.errors import IntegrityError, StoreError
from tests.rlhf_core.artifacts.manifests import manifest, published

pytestmark = pytest.mark.parts


def _folder(path: Path, **files: str) -> Path:
    for name, text in files.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def test_what_was_published_is_fetched_byte_by_byte(repository: ArtifactRepository, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "made", a="one", sub__b="two", sub__c="one")
    stored = repository.publish(manifest("first"), folder)
    digest = hashlib.sha256(b"one").hexdigest()
    assert stored.files[0] == FileEntry(path="a", size=3, sha256=digest)
    assert [file.path for file in stored.files] == ["a", "sub/b", "sub/c"]
    assert repository.manifest(stored.ref) == stored
    assert repository.store.get(f"blobs/sha256/{digest[:2]}/{digest}") == b"one"
    fetched = repository.fetch(stored.ref, tmp_path / "cache")
    assert {p.relative_to(fetched).as_posix(): p.read_text() for p in fetched.rglob("*") if p.is_file()} == {
        "a": "one", "sub/b": "two", "sub/c": "one",
    }  # fmt: skip
    assert stat.S_IMODE((fetched / "a").stat().st_mode) == 0o444
    assert repository.fetch(stored.ref, tmp_path / "cache") == fetched
    only = repository.fetch(stored.ref, tmp_path / "cache", only=["sub/b"])
    assert [p.name for p in only.rglob("*") if p.is_file()] == ["b"]


def test_nothing_is_there_before_it_is_published(repository: ArtifactRepository, tmp_path: Path) -> None:
    ref = manifest("first").ref
    assert repository.manifest(ref) is None
    with pytest.raises(StoreError, match="has no artifact sft/"):
        repository.fetch(ref, tmp_path)


def test_the_loser_adopts_the_winner(repository: ArtifactRepository, tmp_path: Path) -> None:
    winner = repository.publish(manifest("first"), _folder(tmp_path / "one", a="one"))
    assert repository.publish(manifest("first", seed=9), _folder(tmp_path / "two", a="two")) == winner
    assert repository.manifest(winner.ref) == winner


def test_of_many_publishers_all_return_the_same(local: ArtifactRepository, tmp_path: Path) -> None:
    folders = [_folder(tmp_path / str(i), a=str(i)) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda folder: local.publish(manifest("first"), folder), folders))
    assert len({result.files for result in results}) == 1
    assert local.manifest(results[0].ref) == results[0]


def test_an_artifact_without_its_blob_is_no_artifact_and_is_made_anew(
    repository: ArtifactRepository, tmp_path: Path
) -> None:
    stored = repository.publish(manifest("first"), _folder(tmp_path / "one", a="one", b="other"))
    repository.store.delete(blob_path(stored.files[0].sha256))
    assert repository.manifest(stored.ref) is None
    again = repository.publish(manifest("first"), _folder(tmp_path / "two", a="two"))
    assert again.files[0].sha256 == hashlib.sha256(b"two").hexdigest()
    assert repository.manifest(stored.ref) == again


def test_changed_bytes_in_the_store_are_noticed(repository: ArtifactRepository, tmp_path: Path) -> None:
    stored = repository.publish(manifest("first"), _folder(tmp_path / "one", a="one"))
    repository.store.put(blob_path(stored.files[0].sha256), b"two")
    with pytest.raises(IntegrityError, match="has another hash"):
        repository.fetch(stored.ref, tmp_path / "cache")
    assert not any(p.is_file() for p in (tmp_path / "cache" / "blobs").iterdir())
    assert not any((tmp_path / "cache" / "temporary").iterdir())


def test_a_file_of_the_cache_that_was_cut_short_is_fetched_again(local: ArtifactRepository, tmp_path: Path) -> None:
    stored = local.publish(manifest("first"), _folder(tmp_path / "one", a="one"))
    file = local.fetch(stored.ref, tmp_path / "cache") / "a"
    os.chmod(file, 0o644)
    file.write_text("o")
    assert (local.fetch(stored.ref, tmp_path / "cache") / "a").read_text() == "one"


def test_many_fetch_at_once(repository: ArtifactRepository, tmp_path: Path) -> None:
    stored = repository.publish(manifest("first"), _folder(tmp_path / "one", a="one", b="two"))
    with ThreadPoolExecutor(6) as pool:
        folders = set(pool.map(lambda _: repository.fetch(stored.ref, tmp_path / "cache"), range(6)))
    assert [(folder / "b").read_text() for folder in folders] == ["two"]


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "x.pkl"])
def test_pickles_are_not_published(local: ArtifactRepository, tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match=r"may be a pickle; save weights as \.safetensors"):
        local.publish(manifest("first"), _folder(tmp_path / "one", **{name: "x"}))
    assert local.store.list("") == []


def test_an_empty_folder_is_not_published(local: ArtifactRepository, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no files"):
        local.publish(manifest("first"), _folder(tmp_path))


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x"])
def test_a_manifest_cannot_write_outside_its_folder(local: ArtifactRepository, tmp_path: Path, path: str) -> None:
    digest = local.put_blob(b"evil")
    bad = manifest("first", files=(FileEntry(path=path, size=4, sha256=digest),))
    local.store.put(f"{bad.ref.path}/manifest.json", bad.model_dump_json().encode())
    with pytest.raises(IntegrityError, match="lead out"):
        local.fetch(bad.ref, tmp_path / "cache")


def test_a_manifest_that_is_none_is_named(local: ArtifactRepository) -> None:
    ref = manifest("first").ref
    local.store.put(f"{ref.path}/manifest.json", b"{}")
    with pytest.raises(IntegrityError, match=f"{ref.path}/manifest.json is not a manifest"):
        local.manifest(ref)


def test_specs_come_back(repository: ArtifactRepository) -> None:
    ref = manifest("first").ref
    spec = StageSpec(
        name="sft", stage="sft", stage_version=1, key=ref.key, config={"a": [1, None]}, inputs={"model": ref},
        user_files={"x.py": "0" * 64}, seed=1, libraries={"torch": "2"}, tracking={"wandb": False}, run_id="r",
    )  # fmt: skip
    with pytest.raises(StoreError, match=r"has no stages/sft/.*/spec\.json"):
        repository.read_spec(ref)
    repository.write_spec(spec)
    assert repository.read_spec(ref) == spec


def test_listing_and_resolving(repository: ArtifactRepository, tmp_path: Path) -> None:
    sft = published(repository, tmp_path / "a", "a")
    other = published(repository, tmp_path / "b", "b")
    rl = published(repository, tmp_path / "c", "c", stage="rl")
    repository.store.put(f"stages/sft/{'f' * 64}/spec.json", b"not finished")
    assert sorted(m.name for m in repository.list_artifacts()) == ["a", "b", "c"]
    assert repository.resolve(str(sft.ref)) == sft.ref
    assert repository.resolve(f"rl/{rl.key[:3]}") == rl.ref
    with pytest.raises(StoreError, match=f"ambiguous.*{other.ref}"):
        repository.resolve("sft/")
    with pytest.raises(StoreError, match="has no artifact or alias"):
        repository.resolve("sft/" + "f" * 12)
    move_alias(repository.store, "tiny", "best", rl.ref, by="me", reason="better")
    assert repository.resolve("tiny/best") == rl.ref
    assert repository.resolve("best") == rl.ref
    move_alias(repository.store, "small", "best", sft.ref, by="me", reason="better")
    with pytest.raises(StoreError, match=r"ambiguous.*aliases/small/best\.json.*aliases/tiny/best\.json"):
        repository.resolve("best")


def test_a_blob_needs_a_real_hash(local: ArtifactRepository, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="is not a SHA-256"):
        local.get_blob("../../etc/passwd", tmp_path / "x")
    assert ArtifactRef(stage="sft", key="0" * 64).path == "stages/sft/" + "0" * 64
