"""What a manifest says of the code that made it."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlhf_core
from rlhf_core.stages import manifests


def test_the_commit_of_a_project_around_an_installed_package_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    package = tmp_path / ".venv/lib/python3.11/site-packages/rlhf_core/__init__.py"
    monkeypatch.setattr(rlhf_core, "__file__", str(package))
    assert manifests._code_revision() == "unknown"
