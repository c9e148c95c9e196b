"""The contract of a store, on a folder and on a real S3 server."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rlhf_core.artifacts import s3_store
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError, StoreError
from tests.services import S3Server


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def test_get_returns_what_put_wrote_last(store: Store) -> None:
    assert store.get("a/b.json") is None
    store.put("a/b.json", b"one")
    assert store.get("a/b.json") == b"one"
    store.put("a/b.json", b"")
    assert store.get("a/b.json") == b""


def test_put_if_absent_keeps_the_first(store: Store) -> None:
    store.put_if_absent("a", b"one")
    with pytest.raises(ConflictError):
        store.put_if_absent("a", b"two")
    assert store.get("a") == b"one"


def test_replace_takes_only_the_newest_tag(store: Store) -> None:
    store.put("a", b"one")
    _, tag = store.get_tagged("a") or (b"", "")
    store.replace("a", b"two", tag)
    with pytest.raises(ConflictError):
        store.replace("a", b"three", tag)
    assert store.get("a") == b"two"


def test_replace_of_what_is_gone_conflicts(store: Store) -> None:
    store.put("a", b"one")
    _, tag = store.get_tagged("a") or (b"", "")
    store.delete("a")
    with pytest.raises(ConflictError):
        store.replace("a", b"two", tag)
    assert store.get("a") is None


def test_of_many_racers_one_wins(store: Store) -> None:
    def first(number: int) -> None:
        store.put_if_absent("race", str(number).encode())

    winner = _one_winner(first)
    data, tag = store.get_tagged("race") or (b"", "")
    assert data == str(winner).encode()
    winner = _one_winner(lambda number: store.replace("race", f"again {number}".encode(), tag))
    assert store.get("race") == f"again {winner}".encode()


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


@pytest.mark.parametrize("size", [0, 70_000])
def test_files_come_back_as_they_were(store: Store, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * (size // 256) + b"end")
    assert store.put_file_if_absent("blobs/x", source) is True
    source.write_bytes(b"other")
    assert store.put_file_if_absent("blobs/x", source) is False
    store.get_file("blobs/x", target)
    assert target.read_bytes() == bytes(range(256)) * (size // 256) + b"end"


def test_a_large_file_goes_up_in_parts(s3_store_url: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(110 * 2**20)  # s3fs splits from 100 MiB
        file.seek(-3, 2)
        file.write(b"end")
    store = open_store(s3_store_url)
    assert store.put_file_if_absent("large", source) is True
    assert store.put_file_if_absent("large", source) is False
    store.get_file("large", target)
    assert target.stat().st_size == 110 * 2**20
    with target.open("rb") as file:
        file.seek(-4, 2)
        assert file.read() == b"\0end"


def test_get_file_of_nothing_says_what_is_missing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="blobs/none"):
        store.get_file("blobs/none", tmp_path / "x")


def test_exists_and_delete(store: Store) -> None:
    assert not store.exists("a/b")
    store.put("a/b", b"x")
    assert store.exists("a/b")
    assert not store.exists("a")
    store.delete("a/b")
    store.delete("a/b")
    assert not store.exists("a/b")


def test_list_is_by_prefix_and_never_stale(store: Store) -> None:
    assert store.list("stages/") == []
    for path in ("stages/sft/ab1/m.json", "stages/sft/ab2/m.json", "stages/sftx/c", "other"):
        store.put(path, b"x")
    assert store.list("stages/sft/") == ["stages/sft/ab1/m.json", "stages/sft/ab2/m.json"]
    assert store.list("stages/sft/ab2") == ["stages/sft/ab2/m.json"]
    assert store.list("stages/sft") == ["stages/sft/ab1/m.json", "stages/sft/ab2/m.json", "stages/sftx/c"]
    assert store.list("")[0] == "other"
    store.delete("stages/sft/ab1/m.json")
    assert store.list("stages/sft/") == ["stages/sft/ab2/m.json"]


def test_another_client_sees_every_write_at_once(store: Store) -> None:
    other = open_store(store.url)
    assert other.get("a") is None
    assert other.list("") == []
    store.put("a", b"one")
    assert other.get("a") == b"one"
    assert other.list("") == ["a"]


@pytest.mark.parametrize("path", ["", "/a", "../a", "a/../b", "a//b", "a/", ".locks/x"])
def test_paths_that_lead_elsewhere_are_refused(store: Store, path: str) -> None:
    with pytest.raises(StoreError, match="cannot name an object"):
        store.put(path, b"x")


def test_a_pickled_store_opens_again(store: Store) -> None:
    store.put("a", b"one")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"one"


def test_the_probe_passes_and_leaves_nothing(store: Store) -> None:
    store.probe()
    assert store.list("") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("relative/folder", "must be an absolute path"),
        ("", "must be an absolute path"),
        ("gs://bucket", "this kind of store is unknown"),
        ("s3://", "write the store as"),
    ],
)
def test_urls_that_name_no_store(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        open_store(url)


@pytest.fixture(scope="module")
def own_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        server.start()
        server.create_bucket("own")
        yield server
    finally:
        server.close()


@pytest.fixture
def own(own_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that the test may stop; `s3://own` is on it."""
    for name, value in own_server.environment().items():
        monkeypatch.setenv(name, value)
    return own_server


def test_a_server_that_restarts_is_waited_for(own: S3Server) -> None:
    store = open_store("s3://own")
    store.put("a", b"before")
    own.stop()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get, "a")
        writing = pool.submit(store.put_if_absent, "b", b"after")
        time.sleep(1)
        assert not reading.done()
        own.start()
        assert reading.result(timeout=60) == b"before"
        writing.result(timeout=60)
    assert store.get("b") == b"after"


def test_a_request_that_takes_longer_than_the_patience_is_repeated(
    own: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after a suspension of the process, or of its machine, during a request."""
    monkeypatch.setattr(s3_store, "_READ_SECONDS", 1.0)
    monkeypatch.setattr(s3_store, "_PATIENCE_SECONDS", 0.5)
    store = open_store("s3://own")
    store.put("asked", b"one")
    (tmp_path / "file").write_bytes(b"file")
    with ThreadPoolExecutor(2) as pool, own.frozen():
        reading = pool.submit(store.get, "asked")
        uploading = pool.submit(store.put_file_if_absent, "uploaded", tmp_path / "file")
        time.sleep(1.5)
        assert not reading.done()
    assert reading.result() == b"one"
    assert uploading.result()
    assert store.get("uploaded") == b"file"


def test_a_full_disk_of_the_copy_is_not_said_of_the_store(store: Store) -> None:
    store.put("a", b"one")
    with pytest.raises(StoreError, match=r"^'/dev/full' cannot be written \(.*No space left on device\)"):
        store.get_file("a", Path("/dev/full"))


def test_a_browser_opens_a_page_of_an_s3_server_without_credentials(s3_store_url: str) -> None:
    store = open_store(s3_store_url)
    store.put("runs/one/report.html", "<p>é</p>".encode())
    link = store.page_url("runs/one/report.html")
    assert link is not None
    opened = httpx.get(link)
    assert (opened.status_code, opened.text) == (200, "<p>é</p>")
    assert opened.headers["content-type"] == "text/html; charset=utf-8"
    assert httpx.get(link.partition("?")[0]).status_code == 403
    assert httpx.get(link.replace("one", "two")).status_code == 403


def test_a_page_cannot_link_to_a_file(local_store_url: str) -> None:
    assert open_store(local_store_url).page_url("runs/one/report.html") is None
