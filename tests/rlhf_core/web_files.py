"""Files on an HTTP server on loopback. Import it as tests.rlhf_core.web_files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.services import http_server


@dataclass
class WebFiles:
    url: str = ""
    contents: dict[str, bytes] = field(default_factory=dict)  # path, with its slash -> content
    versions: str = "ETag"  # what tells a version: ETag, Last-Modified or nothing
    modified: str = "Mon, 05 Jan 2026 10:00:00 GMT"
    after_get: dict[str, bytes] = field(default_factory=dict)  # path -> content from its next download on
    requests: list[str] = field(default_factory=list)  # "HEAD /path"

    def headers(self, content: bytes) -> dict[str, str]:
        version = {
            "ETag": {"ETag": f'"{hashlib.md5(content).hexdigest()}"'},
            "Last-Modified": {"Last-Modified": self.modified},
        }
        return {"Content-Length": str(len(content)), **version.get(self.versions, {})}


@contextmanager
def web_files() -> Iterator[WebFiles]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files.requests.append(f"{self.command} {self.path}")
            content = files.contents.get(self.path)
            self.send_response(404 if content is None else 200)
            for name, value in files.headers(content or b"").items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET" and content is not None:
                if self.path in files.after_get:  # before the answer ends: from then on the test may change contents
                    files.contents[self.path] = files.after_get.pop(self.path)
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    files = WebFiles()
    with http_server(Handler) as files.url:
        yield files
