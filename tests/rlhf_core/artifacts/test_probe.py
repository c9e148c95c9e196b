"""What is wrong with a store is said in one sentence, within seconds, before anything runs."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_core.artifacts import s3_settings, s3_store
from rlhf_core.artifacts.opening import open_store
from rlhf_core.errors import StoreError
from tests.services import LOOPBACK, free_ports

pytestmark = pytest.mark.parts


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


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """An endpoint where nobody listens, with credentials."""
    url = f"http://{LOOPBACK}:{free_ports(1)[0]}"
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    for name, value in (("ENDPOINT_URL", url), ("ACCESS_KEY_ID", "any"), ("SECRET_ACCESS_KEY", "any")):
        monkeypatch.setenv(f"AWS_{name}", value)
    return url


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AWS_REGION", "bad region!", "AWS_REGION=bad region! is not a region"),
        ("AWS_DEFAULT_REGION", "bad region!", "AWS_DEFAULT_REGION=bad region! is not a region"),
        ("AWS_ACCESS_KEY_ID", "\udcff", "AWS_ACCESS_KEY_ID contains an invalid character"),
        ("AWS_SECRET_ACCESS_KEY", "\udcff", "AWS_SECRET_ACCESS_KEY contains an invalid character"),
        ("AWS_SESSION_TOKEN", "a\nb", "AWS_SESSION_TOKEN contains an invalid character"),
        ("AWS_CA_BUNDLE", "/nowhere", "AWS_CA_BUNDLE=/nowhere: there is no such file"),
        ("AWS_PROFILE", "nosuch", "AWS_PROFILE=nosuch: ~/.aws/config has no such profile"),
        ("AWS_CONFIG_FILE", __file__, "the settings of S3 clients cannot be read .*test_probe.py.*: correct that file"),
        ("AWS_ENDPOINT_URL_S3", "junk", "AWS_ENDPOINT_URL_S3=junk is not an address of a server"),
        ("http_proxy", "http://[::1", "http_proxy is not a proxy's address, such as http://host:3128"),
        (
            "http_proxy",
            f"http://{LOOPBACK}:1",
            "through the proxy of http_proxy: correct http_proxy, or name the server",
        ),
    ],
)
def test_the_setting_that_is_wrong_is_named(
    nobody: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    assert re.search(message, found := _reason("s3://bucket/x")), found


def test_a_url_that_is_no_text(nobody: str) -> None:
    assert _reason("s3://bucket/\udcff").startswith("s3://bucket/\\udcff is not valid UTF-8: correct the store's URL")


def test_what_does_not_pass_is_not_tried_again(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", __file__)
    monkeypatch.setenv("AWS_ENDPOINT_URL", nobody.replace("http:", "https:"))
    started = time.monotonic()
    with pytest.raises(StoreError, match=f"no request can be made to {nobody.replace('http:', 'https:')} .*CA_BUNDLE"):
        open_store("s3://bucket/x").exists("a")
    assert time.monotonic() - started < s3_store._PATIENCE_SECONDS / 4


def test_a_long_wait_is_said_once(
    nobody: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(s3_settings, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(s3_store, "_PATIENCE_SECONDS", 0.5)
    with pytest.raises(StoreError, match="no S3 server answers"):
        open_store("s3://bucket/x").exists("a")
    assert capsys.readouterr().err == f"waiting for the S3 server at {nobody}\n"
