"""What is wrong with a store is said in one sentence, within seconds, before anything runs."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_core.artifacts import s3_store
from rlhf_core.artifacts.opening import open_store
from rlhf_core.errors import StoreError
from tests.services import LOOPBACK, free_ports


class _CarelessS3(BaseHTTPRequestHandler):
    """An S3 server like rclone's: it stores and lists, but does not look at If-None-Match and If-Match.

    `forgets`: the one condition header that it ignores.
    """

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    forgets: str

    def do_HEAD(self) -> None:
        self._answer(200)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if "list-type" in query:
            return self._answer(200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
        if path not in self.objects:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        return self._answer(200, self.objects[path])

    def do_PUT(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        stored = self.objects.get(path)
        absent_wanted = self.headers.get("If-None-Match") and self.forgets != "If-None-Match"
        tag = self.headers.get("If-Match") if self.forgets != "If-Match" else None
        if (absent_wanted and stored is not None) or (tag and (stored is None or tag != _tag(stored))):
            return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.objects[path] = body
        return self._answer(200, tag=_tag(body))

    def do_DELETE(self) -> None:
        self.objects.pop(self.path.partition("?")[0], None)
        self._answer(204)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Content-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0].strip(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # checksums
            pass
        return body

    def _answer(self, status: int, body: bytes = b"", tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag or _tag(body))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _tag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


@pytest.fixture
def careless_s3(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (_CarelessS3,), {"objects": {}, "forgets": request.param})
    server = ThreadingHTTPServer((LOOPBACK, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{LOOPBACK}:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    yield "s3://bucket/prefix"
    server.shutdown()
    server.server_close()


def _reason(url: str) -> str:
    with pytest.raises(StoreError) as raised:
        open_store(url).probe()
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("careless_s3", "what"),
    [("If-None-Match", "put-if-absent overwrites"), ("If-Match", "a stale compare-and-swap overwrites")],
    indirect=["careless_s3"],
)
def test_a_server_without_conditional_writes_is_refused(careless_s3: str, what: str) -> None:
    assert f"no conditional writes ({what})" in _reason(careless_s3)


@pytest.mark.parametrize("careless_s3", ["nothing"], indirect=True)
def test_that_server_would_pass_if_it_kept_both_conditions(careless_s3: str) -> None:
    open_store(careless_s3).probe()


def test_a_bucket_that_is_not_there_is_neither_used_nor_made(s3_store_url: str) -> None:
    for _ in range(2):
        assert "there is no bucket `nobody` at http://127.0.0.1" in _reason("s3://nobody/x")


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(s3_store_url: str, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "wrongwrongwrong")
    assert "rejects the credentials" in _reason(s3_store_url)


def test_no_credentials(s3_store_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert _reason(s3_store_url) == ("the store needs credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


def test_an_endpoint_where_nobody_listens(s3_store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://{LOOPBACK}:{free_ports(1)[0]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert _reason(s3_store_url).startswith(f"no S3 server answers at {endpoint}")


def test_an_endpoint_that_takes_connections_and_is_silent(s3_store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        endpoint = f"http://{LOOPBACK}:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setattr(s3_store, "_HURRIED_READ_SECONDS", 1.0)
        assert _reason(s3_store_url).startswith(f"no S3 server answers at {endpoint}")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert f"the store {tmp_path}/file/store fails" in _reason(f"{tmp_path}/file/store")
