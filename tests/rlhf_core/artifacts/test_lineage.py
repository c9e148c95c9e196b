"""From an artifact back to everything that it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.artifacts.lineage import Edge, lineage
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import StoreError
from tests.rlhf_core.artifacts.manifests import published

pytestmark = pytest.mark.parts


def test_every_ancestor_once_parents_first(store_url: str, tmp_path: Path) -> None:
    repository = ArtifactRepository(open_store(store_url))
    data = published(repository, tmp_path / "d", "data", stage="dataset")
    base = published(repository, tmp_path / "b", "base", stage="base")
    sft = published(repository, tmp_path / "s", "sft", parents={"model": base.ref, "dataset": data.ref})
    rl = published(repository, tmp_path / "r", "rl", stage="rl", parents={"model": sft.ref, "dataset": data.ref})
    published(repository, tmp_path / "x", "unrelated")
    found = lineage(repository, rl.ref)
    assert [manifest.name for manifest in found.nodes.values()] == ["data", "base", "sft", "rl"]
    assert set(found.edges) == {
        Edge(sft.ref, rl.ref, "model"),
        Edge(data.ref, rl.ref, "dataset"),
        Edge(base.ref, sft.ref, "model"),
        Edge(data.ref, sft.ref, "dataset"),
    }


def test_a_missing_ancestor_is_named(local_store_url: str, tmp_path: Path) -> None:
    repository = ArtifactRepository(open_store(local_store_url))
    base = published(repository, tmp_path / "b", "base", stage="base")
    sft = published(repository, tmp_path / "s", "sft", parents={"model": base.ref})
    repository.store.delete(f"{base.ref.path}/manifest.json")
    with pytest.raises(StoreError, match=rf"has no artifact {base.ref}, which sft \({sft.ref}\) was made from"):
        lineage(repository, sft.ref)
