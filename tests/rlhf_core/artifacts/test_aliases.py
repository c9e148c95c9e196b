"""Aliases move one step at a time, and nobody's move is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_core.artifacts.aliases import Alias, read_alias
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError, StoreError

pytestmark = pytest.mark.parts

FIRST, SECOND = (ArtifactRef(stage="rl", key=digit * 64) for digit in "12")


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def test_a_move_remembers_where_it_came_from(store: Store) -> None:
    assert read_alias(store, "tiny", "best") is None
    first = move_alias(store, "tiny", "best", FIRST, by="ann", reason="first")
    assert (first.manifest, first.previous, first.sequence) == (FIRST, None, 1)
    second = move_alias(store, "tiny", "best", SECOND, by="bob", reason="better", seen=1)
    assert (second.manifest, second.previous, second.sequence) == (SECOND, FIRST, 2)
    assert read_alias(store, "tiny", "best") == second


def test_a_decision_on_what_is_old_is_refused(store: Store) -> None:
    move_alias(store, "tiny", "best", FIRST, by="ann", reason="first", seen=0)
    with pytest.raises(ConflictError, match=r"points at rl/111111111111 since ann moved it \(first\)"):
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
