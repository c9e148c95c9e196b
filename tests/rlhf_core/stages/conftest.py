"""Both kinds of store as repositories, and this node's folders for one test alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository


@pytest.fixture
def repository(store_url: str) -> ArtifactRepository:
    return ArtifactRepository(open_store(store_url))


@pytest.fixture
def local(local_store_url: str) -> ArtifactRepository:
    return ArtifactRepository(open_store(local_store_url))


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ALIGNMENT_WORKDIR", str(tmp_path / "work"))
