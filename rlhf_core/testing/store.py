"""The contract of a store: conditional writes, reads that are never stale, files of any size."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError, StoreError


class StoreContract:
    """Subclass it with a fixture `store`: an empty Store."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    def test_get_returns_what_put_wrote_last(self, store: Store) -> None:
        assert store.get("a/b.json") is None
        store.put("a/b.json", b"one")
        assert store.get("a/b.json") == b"one"
        store.put("a/b.json", b"")
        assert store.get("a/b.json") == b""

    def test_put_if_absent_keeps_the_first(self, store: Store) -> None:
        store.put_if_absent("a", b"one")
        with pytest.raises(ConflictError):
            store.put_if_absent("a", b"two")
        assert store.get("a") == b"one"

    def test_replace_takes_only_the_newest_tag(self, store: Store) -> None:
        store.put("a", b"one")
        _, tag = store.get_tagged("a") or (b"", "")
        store.replace("a", b"two", tag)
        with pytest.raises(ConflictError):
            store.replace("a", b"three", tag)
        assert store.get("a") == b"two"

    def test_replace_of_what_is_gone_conflicts(self, store: Store) -> None:
        store.put("a", b"one")
        _, tag = store.get_tagged("a") or (b"", "")
        store.delete("a")
        with pytest.raises(ConflictError):
            store.replace("a", b"two", tag)
        assert store.get("a") is None

    def test_of_many_racers_one_wins(self, store: Store) -> None:
        def first(number: int) -> None:
            store.put_if_absent("race", str(number).encode())

        winner = _one_winner(first)
        data, tag = store.get_tagged("race") or (b"", "")
        assert data == str(winner).encode()
        winner = _one_winner(lambda number: store.replace("race", f"again {number}".encode(), tag))
        assert store.get("race") == f"again {winner}".encode()

    @pytest.mark.parametrize("size", [0, 70_000])
    def test_files_come_back_as_they_were(self, store: Store, tmp_path: Path, size: int) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        content = bytes(range(256)) * (size // 256) + b"end"
        source.write_bytes(content)
        assert store.put_file_if_absent("blobs/x", source) is True
        source.write_bytes(b"other")
        assert store.put_file_if_absent("blobs/x", source) is False
        store.get_file("blobs/x", target)
        assert target.read_bytes() == content
        assert store.hashed("blobs/x") == (hashlib.sha256(content).hexdigest(), len(content))

    def test_of_no_object_there_is_no_file_and_no_hash(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="blobs/none"):
            store.get_file("blobs/none", tmp_path / "x")
        assert store.hashed("blobs/none") is None

    def test_a_range_is_a_part_of_the_object_or_what_is_left_of_it(self, store: Store) -> None:
        assert store.get_range("blobs/x", 0, 4) is None
        store.put("blobs/x", b"0123456789")
        parts = [store.get_range("blobs/x", start, 4) for start in (0, 3, 8, 10, 20)]
        assert parts == [b"0123", b"3456", b"89", b"", b""]

    def test_a_full_disk_of_the_copy_is_not_said_of_the_store(self, store: Store) -> None:
        store.put("a", b"one")
        with pytest.raises(StoreError, match=r"^'/dev/full' cannot be written \(.*No space left on device\)"):
            store.get_file("a", Path("/dev/full"))

    def test_a_moved_object_is_at_its_new_place_alone(self, store: Store) -> None:
        store.put("a", b"one")
        store.put("b/c", b"two")
        store.move("a", "b/c")
        assert (store.get("a"), store.get("b/c")) == (None, b"one")
        with pytest.raises(StoreError):
            store.move("a", "b/c")
        assert store.get("b/c") == b"one"

    def test_exists_and_delete(self, store: Store) -> None:
        assert not store.exists("a/b")
        store.put("a/b", b"x")
        assert store.exists("a/b")
        assert not store.exists("a")
        store.delete("a/b")
        store.delete("a/b")
        assert not store.exists("a/b")

    def test_list_is_by_prefix_and_never_stale(self, store: Store) -> None:
        assert store.list("stages/") == []
        for path in ("stages/sft/ab1/m.json", "stages/sft/ab2/m.json", "stages/sftx/c", "other"):
            store.put(path, b"x")
        assert store.list("stages/sft/") == ["stages/sft/ab1/m.json", "stages/sft/ab2/m.json"]
        assert store.list("stages/sft/ab2") == ["stages/sft/ab2/m.json"]
        assert store.list("stages/sft") == ["stages/sft/ab1/m.json", "stages/sft/ab2/m.json", "stages/sftx/c"]
        assert store.list("")[0] == "other"
        store.delete("stages/sft/ab1/m.json")
        assert store.list("stages/sft/") == ["stages/sft/ab2/m.json"]

    def test_entries_are_the_list_with_sizes_ages_and_versions(self, store: Store) -> None:
        assert store.entries("a/") == []
        before = datetime.now(UTC) - timedelta(seconds=5)  # a server's clock may count whole seconds
        for path, data in (("a/x", b"one"), ("a/y/z", b""), ("b", b"other")):
            store.put(path, data)
        entries = store.entries("a/")
        assert [(entry.path, entry.size) for entry in entries] == [("a/x", 3), ("a/y/z", 0)]
        assert all(before <= entry.modified <= datetime.now(UTC) + timedelta(seconds=5) for entry in entries)
        assert store.entries("a/") == entries
        store.put("a/x", b"two")
        [changed, same] = store.entries("a/")
        assert (changed.version != entries[0].version, same) == (True, entries[1])

    @pytest.mark.parametrize("path", ["", "/a", "../a", "a/../b", "a//b", "a/", ".locks/x"])
    def test_paths_that_lead_elsewhere_are_refused(self, store: Store, path: str) -> None:
        with pytest.raises(StoreError, match="cannot name an object"):
            store.put(path, b"x")

    def test_a_pickled_store_connects_again_and_sees_every_write_at_once(self, store: Store) -> None:
        other = pickle.loads(pickle.dumps(store))  # noqa: S301 (made here)
        assert other.get("a") is None
        assert other.list("") == []
        store.put("a", b"one")
        assert other.get("a") == b"one"
        assert other.list("") == ["a"]

    def test_the_probe_passes_and_leaves_nothing(self, store: Store) -> None:
        store.reach()
        store.probe()
        assert store.list("") == []


def _one_winner(write: Callable[[int], None], racers: int = 8) -> int:
    barrier = threading.Barrier(racers)

    def attempt(number: int) -> bool:
        barrier.wait()
        try:
            write(number)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(attempt, range(racers)))
    assert sum(won) == 1
    return won.index(True)
