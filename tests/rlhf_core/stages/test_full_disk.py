"""A full disk, seen by Python, by a library with errors of its own, and by an actor."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlhf_core.errors import StageError
from rlhf_core.stages.full_disk import explained

pytestmark = pytest.mark.parts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ALIGNMENT_CACHE", "ALIGNMENT_WORKDIR", "TMPDIR", "HF_HOME"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.delenv("ALIGNMENT_STORE", raising=False)
    return tmp_path / "ALIGNMENT_CACHE"


@pytest.mark.parametrize("as_text", [False, True])
def test_the_folder_and_its_variable_are_named(cache: Path, as_text: bool) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(cache / "blobs" / "x"))
    error: Exception = StageError(f"rank 0 failed in save: OSError: {full}") if as_text else RuntimeError("wrapped")
    error.__cause__ = None if as_text else full
    said = str(explained(error))
    assert said.startswith(
        f"the disk of {cache} is full: free space there, or move the folder with ALIGNMENT_CACHE in the environment "
        "(of jobs: of the cluster's nodes) ("
    )


def test_a_real_full_disk() -> None:
    with pytest.raises(OSError, match="No space left") as raised, open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")
    assert "is full: free space there" in str(explained(raised.value))


def test_an_error_of_a_library_without_a_path(cache: Path) -> None:
    said = str(explained(RuntimeError("I/O error: No space left on device (os error 28)")))
    assert "is full: free space there, or move the folder with" in said


def test_other_errors_stay() -> None:
    error = OSError(errno.ENOENT, "No such file", "/x")
    assert explained(error) is error
