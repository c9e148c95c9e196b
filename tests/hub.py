"""A hub on loopback with one repository, for tests: branches, commits, files. Import it as tests.hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.services import http_server

REPOSITORY = "some/thing"  # a model and a data set of this name


class Hub:
    """Speaks the calls of huggingface_hub and datasets: revision, tree, paths-info, and resolve for the files."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.branches: dict[str, str] = {}
        self.commits: dict[str, dict[str, bytes]] = {}

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """`files` as the new content of the branch; returns the commit."""
        name = hashlib.sha1(json.dumps({k: v.hex() for k, v in files.items()}).encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def environment(self, home: str) -> dict[str, str]:
        """What a process needs that talks to this hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": home, "HF_HUB_DISABLE_XET": "1"}

    def answer(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        prefixes = [f"/{REPOSITORY}/", f"/datasets/{REPOSITORY}/"]
        prefixes += [f"/api/{kind}/{REPOSITORY}/" for kind in ("models", "datasets")]
        rest = next((path.removeprefix(prefix) for prefix in prefixes if path.startswith(prefix)), "")
        what, _, place = rest.partition("/")
        revision, _, name = place.partition("/")
        commit = self.branches.get(revision, revision)
        files = self.commits.get(commit)
        if files is None:
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        if what == "revision":
            return _json({"id": REPOSITORY, "sha": commit, "siblings": [{"rfilename": n} for n in files]})
        if what == "tree":
            return _json([_entry(n, files[n]) for n in files if not name])
        if what == "paths-info":
            asked = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            return _json([_entry(n, files[n]) for n in files if n in asked])
        if what == "resolve" and name in files:
            return 200, files[name], {"X-Repo-Commit": commit, "ETag": f'"{_digest(files[name])}"'}
        return 404, b"", {"X-Error-Code": "EntryNotFound"}


@contextmanager
def running_hub() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            status, content, headers = hub.answer(urlsplit(self.path).path, self.rfile.read(length))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with http_server(Handler) as endpoint:
        hub = Hub(endpoint)
        yield hub


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _json(value: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
