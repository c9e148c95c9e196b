"""Checkpoints on both kinds of store: whole or not at all, verified, removed only when a newer one is whole."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlhf_core.artifacts.checkpoints import Checkpoint, Checkpoints
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError, IntegrityError

pytestmark = pytest.mark.parts

REF = ArtifactRef(stage="sft", key="a" * 64)
FOLDER = f"stages/sft/{'a' * 64}/checkpoints"


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def save(store: Store, step: int, folder: Path) -> Checkpoint:
    """A whole checkpoint of two files."""
    checkpoints = Checkpoints(store, REF)
    name = checkpoints.new_name(step)
    (folder / "rank0").write_bytes(b"weights %d" % step)
    files = (checkpoints.add(name, "rank0.safetensors", folder / "rank0"), checkpoints.add(name, "driver.json", b"{}"))
    checkpoint = Checkpoint(name=name, step=step, ranks=1, files=files, libraries={}, created_at=datetime.now(UTC))
    checkpoints.commit(checkpoint)
    return checkpoint


def steps(store: Store) -> list[int]:
    return [found.step for found in Checkpoints(store, REF).newest() if isinstance(found, Checkpoint)]


def test_the_newest_whole_one_comes_first_and_is_verified(store: Store, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, REF)
    assert (steps(store), checkpoints.newest_step()) == ([], None)
    for step in (9, 100, 20):
        save(store, step, tmp_path)
    newest = next(checkpoints.newest())
    assert isinstance(newest, Checkpoint)
    assert (steps(store), checkpoints.newest_step()) == ([100, 20, 9], 100)
    checkpoints.fetch(newest, "rank0.safetensors", tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"weights 100"
    assert checkpoints.read(newest, "driver.json") == b"{}"
    other = Checkpoints(store, ArtifactRef(stage="sft", key="b" * 64))
    assert list(other.newest()) == []


def test_without_its_manifest_it_is_none(store: Store, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, REF)
    whole = save(store, 1, tmp_path)
    checkpoints.add(checkpoints.new_name(2), "driver.json", b"{}")
    assert steps(store) == [1]
    with pytest.raises(ConflictError):
        checkpoints.commit(whole)


def test_damage_is_named(store: Store, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, REF)
    damaged = save(store, 2, tmp_path)
    whole = save(store, 1, tmp_path)
    store.put(f"{FOLDER}/{damaged.name}/rank0.safetensors", b"weights 3")
    with pytest.raises(IntegrityError, match=rf"{damaged.name}/rank0.safetensors is damaged"):
        checkpoints.fetch(damaged, "rank0.safetensors", tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()
    store.delete(f"{FOLDER}/{damaged.name}/driver.json")
    with pytest.raises(IntegrityError, match=r"driver.json is gone"):
        checkpoints.read(damaged, "driver.json")
    with pytest.raises(IntegrityError, match=r"has no file rank1.safetensors"):
        checkpoints.fetch(whole, "rank1.safetensors", tmp_path / "fetched")
    store.put(f"{FOLDER}/{damaged.name}/manifest.json", b"{")
    found = list(checkpoints.newest())
    assert found[1:] == [whole]
    assert isinstance(found[0], IntegrityError)


def test_a_file_that_leads_elsewhere_is_refused(store: Store, tmp_path: Path) -> None:
    whole = save(store, 1, tmp_path)
    path = f"{FOLDER}/{whole.name}/manifest.json"
    text = store.get(path)
    assert text is not None
    store.put(path, text.replace(b'"driver.json"', b'"../../spec.json"'))
    (found,) = Checkpoints(store, REF).newest()
    assert isinstance(found, IntegrityError)


def test_old_ones_go_when_a_newer_one_is_whole(store: Store, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, REF)
    half = checkpoints.new_name(2)
    checkpoints.add(half, "driver.json", b"{}")
    names = {step: save(store, step, tmp_path).name for step in (1, 3, 4, 9)}
    assert len(store.list(FOLDER)) == 4 * 3 + 1
    checkpoints.prune(names[4], keep=2)
    assert steps(store) == [4, 3]
    assert {path.split("/")[4] for path in store.list(FOLDER)} == {names[4], names[3]}
    checkpoints.clear()
    assert store.list(FOLDER) == []
