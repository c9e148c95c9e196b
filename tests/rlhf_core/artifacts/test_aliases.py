"""Aliases move one step at a time, and nobody's move is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_core.artifacts.aliases import Alias, read_alias
from rlhf_core.artifacts.deletions import Deletions
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository, manifest_path
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError, StoreError
from tests.rlhf_core.artifacts.manifests import manifest, published

pytestmark = pytest.mark.parts

FIRST, SECOND = (manifest(name).ref for name in ("first", "second"))


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> Store:
    """It has both artifacts."""
    repository = ArtifactRepository(open_store(store_url))
    assert [published(repository, tmp_path / name, name).ref for name in ("first", "second")] == [FIRST, SECOND]
    return repository.store


def test_a_move_remembers_where_it_came_from(store: Store) -> None:
    assert read_alias(store, "tiny", "best") is None
    first = move_alias(store, "tiny", "best", FIRST, by="ann", reason="first")
    assert (first.manifest, first.previous, first.sequence) == (FIRST, None, 1)
    second = move_alias(store, "tiny", "best", SECOND, by="bob", reason="better", seen=1)
    assert (second.manifest, second.previous, second.sequence) == (SECOND, FIRST, 2)
    assert read_alias(store, "tiny", "best") == second


def test_a_decision_on_what_is_old_is_refused(store: Store) -> None:
    move_alias(store, "tiny", "best", FIRST, by="ann", reason="first", seen=0)
    with pytest.raises(ConflictError, match=rf"points at {FIRST} since ann moved it \(first\)"):
        move_alias(store, "tiny", "best", SECOND, by="bob", reason="better", seen=0)


def test_of_racing_moves_each_is_seen_or_refused(store: Store) -> None:
    barrier = threading.Barrier(4)

    def move(name: str) -> Alias | None:
        barrier.wait()
        try:
            return move_alias(store, "tiny", "best", FIRST, by=name, reason="race", seen=0)
        except ConflictError:
            return None

    with ThreadPoolExecutor(4) as pool:
        moved = [alias for alias in pool.map(move, "abcd") if alias]
    assert moved == [read_alias(store, "tiny", "best")]


@pytest.mark.parametrize("name", ["", "../x", "A", "a/b"])
def test_names_are_plain(local_store_url: str, name: str) -> None:
    with pytest.raises(StoreError, match="is not a valid name of a model or an alias"):
        read_alias(open_store(local_store_url), "tiny", name)


def test_a_move_to_what_a_collection_has_just_deleted_is_an_error(local_store_url: str, tmp_path: Path) -> None:
    repository = ArtifactRepository(open_store(local_store_url))
    made = published(repository, tmp_path / "made", "made")
    with Deletions(repository.store) as deletions, ThreadPoolExecutor(1) as pool:
        deletions.announce([made.ref.path])
        moving = pool.submit(move_alias, repository.store, "tiny", "best", made.ref, by="ann", reason="")
        with pytest.raises(TimeoutError):
            moving.result(timeout=0.3)
        repository.store.delete(manifest_path(made.ref))
        deletions.announce([])
        with pytest.raises(StoreError, match=f"{made.ref}, or a file of it, is gone from the store"):
            moving.result(timeout=10)
