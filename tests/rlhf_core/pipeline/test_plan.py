"""What a plan says of a node, and why."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlhf_core.artifacts.checkpoints import Checkpoint, Checkpoints
from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.pipeline.graph import build_graph
from rlhf_core.pipeline.loading import LoadedRecipe, load_recipe
from rlhf_core.stages.key import computing_libraries
from tests.rlhf_core.pipeline.recipes import planned

RECIPE = """
name: planned
data: {talks: {format: conversations, source: {type: files, paths: [talks.jsonl]}}}
base: {source: {type: scratch}}
sft: {dataset: talks, batch_size: 2, max_length: 64, optimizer: {learning_rate: 1e-3}}
report: null
"""


@pytest.fixture
def repository(tmp_path: Path, store_url: str) -> ArtifactRepository:
    (tmp_path / "talks.jsonl").write_text("{}", encoding="utf-8")
    (tmp_path / "planned.yaml").write_text(RECIPE, encoding="utf-8")
    return ArtifactRepository(open_store(store_url))


def load(tmp_path: Path, *overrides: str) -> LoadedRecipe:
    return load_recipe(str(tmp_path / "planned.yaml"), overrides)


def publish_all(loaded: LoadedRecipe, repository: ArtifactRepository, folder: Path) -> None:
    """What a finished run leaves in the store."""
    folder.mkdir()
    (folder / "file").write_text("content", encoding="utf-8")
    for node in build_graph(loaded, computing_libraries()).values():
        now = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
        manifest = Manifest(
            kind=Kind.DATASET, name=node.name, stage=node.stage.name, key=node.ref.key, files=(),
            parents=dict(node.input_refs), user_files=dict(node.user_files), config=node.config.model_dump(mode="json"),
            seed=loaded.recipe.seed, code_revision="0", libraries=computing_libraries(), device_seconds=0.0,
            device="cpu", started_at=now, finished_at=now,
        )  # fmt: skip
        repository.publish(manifest, folder)


def said(loaded: LoadedRecipe, repository: ArtifactRepository | None) -> dict[str, str]:
    return {node.name: f"{node.action}: {node.why}" for node in planned(loaded, repository)}


def test_nothing_is_there_then_everything_is_reused(tmp_path: Path, repository: ArtifactRepository) -> None:
    loaded = load(tmp_path)
    assert said(loaded, None) == dict.fromkeys(["base", "data.talks", "sft"], "compute: no store is set")
    assert said(loaded, repository) == dict.fromkeys(["base", "data.talks", "sft"], "compute: never computed")
    assert list(repository.store.list("")) == []
    publish_all(loaded, repository, tmp_path / "files")
    assert said(loaded, repository) == dict.fromkeys(["base", "data.talks", "sft"], "reuse: made 2026-01-02 03:04")


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_the_reason_is_what_changed(tmp_path: Path, repository: ArtifactRepository) -> None:
    publish_all(load(tmp_path), repository, tmp_path / "files")
    changed = said(load(tmp_path, "sft.optimizer.learning_rate=2e-3", "sft.placement.workers=2"), repository)
    assert changed["sft"] == "compute: optimizer.learning_rate: 0.001 → 0.002"
    assert changed["base"].startswith("reuse")

    assert said(load(tmp_path, "base.dtype=float32"), repository)["sft"] == "compute: after base"
    assert said(load(tmp_path, "seed=5"), repository)["base"] == "compute: seed: 0 → 5"

    (tmp_path / "talks.jsonl").write_text("[]", encoding="utf-8")
    by_file = said(load(tmp_path), repository)
    assert by_file["data.talks"] == "compute: the file talks.jsonl changed"
    assert by_file["sft"] == "compute: after data.talks"


@pytest.mark.parametrize("store_url", ["local"], indirect=True)
def test_an_artifact_that_lost_its_files_is_computed_again(tmp_path: Path, repository: ArtifactRepository) -> None:
    loaded = load(tmp_path)
    publish_all(loaded, repository, tmp_path / "files")
    for path in list(repository.store.list("blobs")):
        repository.store.delete(path)
    assert said(loaded, repository)["base"] == "compute: its files are gone from the store"


def test_a_checkpoint_says_where_a_killed_stage_goes_on(tmp_path: Path, repository: ArtifactRepository) -> None:
    loaded = load(tmp_path)
    ref = build_graph(loaded, computing_libraries())["sft"].ref
    checkpoints = Checkpoints(repository.store, ref)
    name = checkpoints.new_name(40)
    checkpoints.commit(
        Checkpoint(name=name, step=40, ranks=1, files=(), libraries={}, created_at=datetime(2026, 1, 2, tzinfo=UTC))
    )
    assert said(loaded, repository)["sft"] == "compute: never computed; resumes from step 40"
    assert said(load(tmp_path, "sft.checkpoint.resume=false"), repository)["sft"] == "compute: never computed"
