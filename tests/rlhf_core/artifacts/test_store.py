"""What is particular to a store on S3, and URLs that name none; the contract of both is in tests/contracts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rlhf_core.artifacts import s3_store
from rlhf_core.artifacts.opening import open_store
from rlhf_core.errors import StoreError
from tests.services import S3Server

pytestmark = pytest.mark.parts


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


@pytest.mark.slow("a server starts twice")
@pytest.mark.endurance("chaos")
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
