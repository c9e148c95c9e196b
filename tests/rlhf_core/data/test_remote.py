"""Downloads of exactly the content that was pinned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from rlhf_core.data.sources import remote
from rlhf_core.data.sources.remote import UnreadableError, fetch_file, fetch_folder, file_identity, folder_identity
from rlhf_core.errors import StageError
from tests.rlhf_core.web_files import WebFiles, web_files

CHANGED = r"/d\.jsonl: the content changed since the run was planned \(then {}, now {}\): run again"


@pytest.fixture
def files() -> Iterator[WebFiles]:
    with web_files() as found:
        found.contents["/d.jsonl"] = b"one\n"
        yield found


@pytest.mark.parametrize(
    ("versions", "identity", "now"),
    [
        (
            "ETag",
            r'ETag "5bbf5a52328e7439ae6e719dfe712200", 4 bytes',
            'ETag "c193497a1a06b2c72230e6146ff47080", 4 bytes',
        ),
        ("Last-Modified", "Last-Modified Mon, 05 Jan 2026 10:00:00 GMT, 4 bytes", "Last-Modified Tue, .*, 4 bytes"),
        (
            "nothing",
            f"sha256 {'2c8b08da5ce60398e1f19af0e5dccc744df274b826abe585eaba68c525434806'}",
            "sha256 27dd8ed4.*",
        ),
    ],
)
def test_changed_content_is_not_loaded(tmp_path: Path, files: WebFiles, versions: str, identity: str, now: str) -> None:
    files.versions = versions
    url = f"{files.url}/d.jsonl"
    assert file_identity(url) == file_identity(url) == identity
    fetch_file(url, identity, tmp_path / "same")
    assert (tmp_path / "same").read_bytes() == b"one\n"
    files.contents["/d.jsonl"], files.modified = b"two\n", "Tue, 06 Jan 2026 10:00:00 GMT"
    with pytest.raises(StageError, match=CHANGED.format(identity, now)):
        fetch_file(url, identity, tmp_path / "changed")
    fetch_file(url, None, tmp_path / "unpinned")
    assert (tmp_path / "unpinned").read_bytes() == b"two\n"


def test_content_that_changes_while_it_is_downloaded_is_refused(tmp_path: Path, files: WebFiles) -> None:
    url = f"{files.url}/d.jsonl"
    pinned = file_identity(url)
    files.after_get["/d.jsonl"] = b"two\n"
    with pytest.raises(StageError, match="the content changed since the run was planned"):
        fetch_file(url, pinned, tmp_path / "d")


def test_a_server_that_no_longer_reports_versions_is_refused(tmp_path: Path, files: WebFiles) -> None:
    url = f"{files.url}/d.jsonl"
    pinned = file_identity(url)
    files.versions = "nothing"
    with pytest.raises(StageError, match="now without a version"):
        fetch_file(url, pinned, tmp_path / "d")


def test_a_file_without_a_version_is_hashed_up_to_a_bound(files: WebFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.versions = "nothing"
    monkeypatch.setattr(remote, "MAX_HASHED_BYTES", 3)
    with pytest.raises(UnreadableError, match=r"reports no ETag .* larger than the 3 bytes"):
        file_identity(f"{files.url}/d.jsonl")


def test_a_local_file_is_hashed_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_HASHED_BYTES", 3)
    (tmp_path / "d").write_bytes(b"one\n")
    assert file_identity(f"file://{tmp_path}/d").startswith("sha256 2c8b08da")


def test_what_cannot_be_read_says_why(tmp_path: Path, files: WebFiles) -> None:
    with pytest.raises(UnreadableError, match="404"):
        file_identity(f"{files.url}/other")
    with pytest.raises(UnreadableError, match=r"there is no protocol `s4` \(did you mean `s3`"):
        file_identity("s4://bucket/d.jsonl")
    with pytest.raises(UnreadableError, match="is a folder"):
        file_identity(f"file://{tmp_path}")
    for url in ("file://d.jsonl", "local://d.jsonl", "simplecache::file://d.jsonl"):
        with pytest.raises(UnreadableError, match=r"write (file|local):///… with the whole path, or the path alone"):
            file_identity(url)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableError, match="is a named pipe, not a file"):
        file_identity(f"file://{tmp_path}/pipe")
    with pytest.raises(StageError, match=r"/other: cannot be read \(there is no such file or folder\)"):
        fetch_file(f"{files.url}/other", None, tmp_path / "d")


def test_a_folder_is_loaded_as_it_was_pinned(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/model"
    for name in ("config.json", "model.safetensors", "notes.md"):
        _write(f"{url}/{name}", name)
    pinned = folder_identity(url, (".json", ".safetensors"))
    _write(f"{url}/added.json", "added")
    _write(f"{url}/notes.md", "other notes")
    fetch_folder(url, pinned, (".json", ".safetensors"), tmp_path / "pinned")
    assert {p.name: p.read_text() for p in (tmp_path / "pinned").iterdir()} == {
        "config.json": "config.json",
        "model.safetensors": "model.safetensors",
    }
    fetch_folder(url, None, (".json",), tmp_path / "now")
    assert {p.name for p in (tmp_path / "now").iterdir()} == {"config.json", "added.json"}
    _write(f"{url}/model.safetensors", "changed")
    with pytest.raises(StageError, match=r"model/model\.safetensors: the content changed since the run was planned"):
        fetch_folder(url, pinned, (".json", ".safetensors"), tmp_path / "changed")
    with pytest.raises(UnreadableError, match=r"no file that ends in \.bin"):
        folder_identity(url, (".bin",))


def _write(url: str, content: str) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content.encode())
