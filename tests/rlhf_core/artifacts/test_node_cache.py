"""The node's cache stays within its bound, and keeps what running processes use."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_core.artifacts.node_cache import NodeCache, bound_from_environment
from rlhf_core.errors import VariableError
from rlhf_core.system.scratch import scratch_folder

pytestmark = pytest.mark.parts

SIZE = 1000  # bytes of a blob
BOUND = 2500
# Asks for folders as jobs do, and uses them until its input ends. Arguments: the cache, then `blob,blob` a folder.
JOB = f"""
import hashlib, sys
from pathlib import Path
from rlhf_core.artifacts.node_cache import NodeCache
cache = NodeCache(Path(sys.argv[1]), {BOUND})
for names in sys.argv[2:]:
    files = {{name: hashlib.sha256(name.encode()).hexdigest() for name in names.split(",")}}
    cache.folder(files, lambda sha256, path: path.write_bytes(sha256.encode().ljust({SIZE})) and None)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def job(root: Path, *folders: str) -> Iterator[None]:
    """A process that has asked for `folders` and uses them."""
    command = [sys.executable, "-c", JOB, str(root), *folders]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.communicate(timeout=60)


def blobs(root: Path) -> set[str]:
    """Names of those in the cache, among a to f."""
    digests = {hashlib.sha256(name.encode()).hexdigest(): name for name in "abcdef"}
    return {digests[path.name] for path in (root / "blobs").iterdir() if path.suffix != ".size"}


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    with job(tmp_path, "a", "b"):
        pass
    with job(tmp_path, "a"):  # used again
        pass
    assert blobs(tmp_path) == {"a", "b"}
    with job(tmp_path, "c"):
        assert blobs(tmp_path) == {"a", "c"}
    assert len(list((tmp_path / "folders").iterdir())) == 2


def test_what_a_running_process_uses_stays_and_a_blob_of_two_folders_with_it(tmp_path: Path) -> None:
    with job(tmp_path, "a,b"):
        with job(tmp_path, "a,c"):
            pass
        with job(tmp_path, "d"):
            assert blobs(tmp_path) == {"a", "b", "d"}  # the bound is exceeded by what is in use
    with job(tmp_path, "e"):
        assert blobs(tmp_path) == {"d", "e"}


def test_a_removed_folder_is_fetched_again(tmp_path: Path) -> None:
    for names in ("a,b", "c,d", "a,b"):
        with job(tmp_path, names):
            assert blobs(tmp_path) == set(names.split(","))
            (folder,) = (tmp_path / "folders").iterdir()
            assert {path.name: path.stat().st_size for path in folder.iterdir()} == dict.fromkeys(
                names.split(","), SIZE
            )


def test_what_a_killed_job_left_half_transferred_goes_with_the_next_transfer(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, BOUND)
    killed = tmp_path / "temporary" / "alignment-scratch-blob-killed"
    killed.mkdir()
    (killed / "part").write_bytes(b"x")
    with scratch_folder("blob", tmp_path / "temporary") as living:
        cache.folder({"a": hashlib.sha256(b"a").hexdigest()}, lambda digest, path: path.write_text("a") and None)
        assert list((tmp_path / "temporary").iterdir()) == [living]


def test_the_bound_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ALIGNMENT_CACHE_GIB", raising=False)
    assert bound_from_environment() == 50 * 2**30
    monkeypatch.setenv("ALIGNMENT_CACHE_GIB", "0.5")
    assert bound_from_environment() == 2**29
    for wrong in ("many", "-1", "0", "nan"):
        monkeypatch.setenv("ALIGNMENT_CACHE_GIB", wrong)
        with pytest.raises(VariableError, match=f"^ALIGNMENT_CACHE_GIB is `{wrong}`: set it to the number of GiB"):
            NodeCache(tmp_path)
