"""A job loads exactly what its key was computed with: the planned commit, and no file that changed since."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file

from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.config.stages.base_model import BaseModelConfig, ScratchModel
from rlhf_core.data.reading import dataset_info, read_rows
from rlhf_core.errors import StageError
from rlhf_core.graph.graph import build_graph
from rlhf_core.pipeline.specs import RunSettings, store_spec
from rlhf_core.recipe.loading import load_recipe
from rlhf_core.stages.base import run as make_base
from rlhf_core.stages.key import computing_libraries
from rlhf_core.stages.runner import run_job
from tests.hub import REPOSITORY, Hub, running_hub
from tests.rlhf_core.stages.context import LocalContext
from tests.rlhf_core.web_files import web_files

pytestmark = [pytest.mark.endurance("architectures"), pytest.mark.usefixtures("own_folders")]

RECIPE = """
name: pinned
data: {d: {format: text, DATA}}
base: {source: MODEL, dtype: float32}
pretrain: {dataset: d, batch_size: 1, max_length: 64, optimizer: {learning_rate: 1e-3}}
report: null
tracking: {wandb: false, tensorboard: false}
"""
SCRATCH = ScratchModel(type="scratch", hidden_size=8, intermediate_size=8, layers=1, heads=1, context_length=16)


def planned(
    repository: ArtifactRepository, folder: Path, node: str, *, data: str, model: str = "{type: scratch}"
) -> StageSpec:
    """The spec of a node of the recipe, stored as a flow stores it."""
    data = data if data.startswith("mix: ") else f"source: {data}"
    (folder / "pinned.yaml").write_text(RECIPE.replace("DATA", data).replace("MODEL", model))
    loaded = load_recipe(str(folder / "pinned.yaml"))
    libraries = computing_libraries()
    tracking = loaded.recipe.tracking.model_dump(mode="json")
    settings = RunSettings("run", repository.store.url, folder, tracking, loaded.recipe.name)
    chosen = build_graph(loaded, libraries)[node]
    store_spec(chosen, settings, repository)
    return repository.read_spec(chosen.ref)


def model_files(folder: Path, seed: int) -> dict[str, bytes]:
    output = make_base(BaseModelConfig(source=SCRATCH, dtype="float32"), {}, LocalContext(folder, given_seed=seed))
    return {path.name: path.read_bytes() for path in output.folder.iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """What huggingface_hub talks to in this process."""
    with running_hub() as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        yield running


def run_with(hub: Hub, spec: StageSpec, url: str, home: Path) -> None:
    """The job as a process of its own: huggingface_hub reads its settings when it is imported."""
    command = [sys.executable, "-m", "rlhf_core.stages", "--store", url, "--stage", spec.stage, "--key", spec.key]
    environment = {**os.environ, **hub.environment(str(home))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.endurance("architectures")
def test_the_planned_commit_of_a_data_set_is_loaded(local: ArtifactRepository, tmp_path: Path, hub: Hub) -> None:
    """Whether it is copied first or read as it comes."""
    commit = hub.commit({"train.jsonl": b'{"text": "planned"}\n'})
    copied, streamed = (
        f"{{source: {{type: hub, repository: {REPOSITORY}, streaming: {streaming}}}}}" for streaming in (False, True)
    )
    data = f"mix: [{copied}, {streamed}], stop: all_exhausted, drop_duplicates: false"
    spec = planned(local, tmp_path, "data.d", data=data)
    hub.commit({"train.jsonl": b'{"text": "newer"}\n'})
    run_with(hub, spec, local.store.url, tmp_path / "hub")
    folder = local.fetch(spec.ref, tmp_path / "cache")
    assert {row["text"] for row in read_rows(folder)} == {"planned"}
    assert [source["read"] for source in dataset_info(folder)["sources"]] == [1, 1]
    manifest = local.manifest(spec.ref)
    assert manifest is not None
    assert manifest.pins == {f"hf://datasets/{REPOSITORY}@main": commit}


@pytest.mark.slow("starts a hub and a job")
def test_the_planned_commit_of_a_model_is_loaded(local: ArtifactRepository, tmp_path: Path, hub: Hub) -> None:
    old, new = model_files(tmp_path / "old", seed=1), model_files(tmp_path / "new", seed=2)
    hub.commit(old)
    source = f"{{type: hub, repository: {REPOSITORY}}}"
    spec = planned(local, tmp_path, "base", data="{type: files, paths: [pinned.yaml]}", model=source)
    hub.commit(new)
    run_with(hub, spec, local.store.url, tmp_path / "hub")
    (tmp_path / "old.safetensors").write_bytes(old["model.safetensors"])
    stored = load_file(local.fetch(spec.ref, tmp_path / "cache") / "model.safetensors")
    expected = load_file(tmp_path / "old.safetensors")
    assert stored.keys() == expected.keys()
    assert all((stored[name] == expected[name]).all() for name in expected)


def test_an_s3_object_that_changed_since_the_plan_ends_the_job(
    local: ArtifactRepository, tmp_path: Path, s3_store_url: str
) -> None:
    url = f"{s3_store_url}/d.jsonl"
    _write(url, b'{"text": "planned"}\n')
    unchanged = planned(local, tmp_path, "data.d", data=f"{{type: files, paths: ['{url}']}}")
    run_job(local.store.url, unchanged.ref)
    assert [row["text"] for row in read_rows(local.fetch(unchanged.ref, tmp_path / "cache"))] == ["planned"]
    _write(url, b'{"text": "second!"}\n')
    changed = planned(local, tmp_path, "data.d", data=f"{{type: files, paths: ['{url}']}}")
    assert changed.key != unchanged.key
    _write(url, b'{"text": "third!!"}\n')
    with pytest.raises(
        StageError, match=rf"{url}: the content changed since the run was planned \(then ETag .*now ETag"
    ):
        run_job(local.store.url, changed.ref)
    assert local.manifest(changed.ref) is None


def test_an_s3_model_folder_that_changed_since_the_plan_ends_the_job(
    local: ArtifactRepository, tmp_path: Path, s3_store_url: str
) -> None:
    url = f"{s3_store_url}/model"
    for name, content in model_files(tmp_path / "made", seed=1).items():
        _write(f"{url}/{name}", content)
    source = f"{{type: folder, path: '{url}'}}"
    spec = planned(local, tmp_path, "base", data="{type: files, paths: [pinned.yaml]}", model=source)
    config = BaseModelConfig.model_validate_json(f'{{"source": {{"type": "folder", "path": "{url}"}}}}')
    make_base(config, {}, LocalContext(tmp_path / "whole", pins=spec.pins))
    _write(f"{url}/model.safetensors", b"other weights")
    with pytest.raises(StageError, match=r"/model/model\.safetensors: the content changed since the run was planned"):
        run_job(local.store.url, spec.ref)
    assert local.manifest(spec.ref) is None


def test_a_web_file_that_changed_since_the_plan_ends_the_job(local: ArtifactRepository, tmp_path: Path) -> None:
    with web_files() as files:
        files.versions = "nothing"  # so that the content itself is compared
        files.contents["/d.jsonl"] = b'{"text": "planned"}\n'
        data = f"{{type: files, paths: ['{files.url}/d.jsonl']}}"
        spec = planned(local, tmp_path, "data.d", data=data)
        files.contents["/d.jsonl"] = b'{"text": "changed"}\n'
        with pytest.raises(StageError, match=r"d\.jsonl: the content changed since the run was planned \(then sha256 "):
            run_job(local.store.url, spec.ref)
        files.contents["/d.jsonl"] = b'{"text": "planned"}\n'
        run_job(local.store.url, spec.ref)
    assert [row["text"] for row in read_rows(local.fetch(spec.ref, tmp_path / "cache"))] == ["planned"]


def _write(url: str, content: bytes) -> None:
    filesystem, path = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    filesystem.pipe_file(path, content)
