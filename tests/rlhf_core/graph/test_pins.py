"""Remote sources: changed content is another key, which the plan reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import pytest
from huggingface_hub import constants

from rlhf_core.artifacts.manifest import Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.errors import RecipeError
from rlhf_core.graph.graph import Node, build_graph
from rlhf_core.recipe.loading import LoadedRecipe, load_recipe
from rlhf_core.stages.key import computing_libraries
from tests.hub import REPOSITORY, Hub, running_hub
from tests.rlhf_core.recipes import planned
from tests.rlhf_core.web_files import WebFiles, web_files

RECIPE = """
name: pinned
data: {d: {format: text, source: {type: files, paths: [{url}]}}}
base: {source: {type: scratch}}
pretrain: {dataset: d, batch_size: 1, max_length: 64, optimizer: {learning_rate: 1e-3}}
report: null
"""
HUB_DATA = f"data.d.source={{type: hub, repository: {REPOSITORY}}}"
HUB_MODEL = f"base.source={{type: hub, repository: {REPOSITORY}}}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """What huggingface_hub talks to in this process."""
    with running_hub() as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        yield running


@pytest.fixture
def files() -> Iterator[WebFiles]:
    with web_files() as found:
        found.contents["/d.jsonl"] = b"one\n"
        yield found


def load(folder: Path, *overrides: str, url: str = "local.jsonl") -> LoadedRecipe:
    (folder / "local.jsonl").write_text('{"text": "x"}\n')
    (folder / "pinned.yaml").write_text(RECIPE.replace("{url}", url))
    return load_recipe(str(folder / "pinned.yaml"), overrides)


def graph(folder: Path, *overrides: str, url: str = "local.jsonl") -> dict[str, Node]:
    return build_graph(load(folder, *overrides, url=url), computing_libraries())


def test_a_branch_that_moved_is_another_key(tmp_path: Path, hub: Hub) -> None:
    first = hub.commit({"train.jsonl": b"one"})
    before = graph(tmp_path, HUB_DATA, HUB_MODEL)
    assert before["data.d"].pins == {f"hf://datasets/{REPOSITORY}@main": first}
    assert before["base"].pins == {f"hf://{REPOSITORY}@main": first}
    assert {n: x.ref for n, x in graph(tmp_path, HUB_DATA, HUB_MODEL).items()} == {n: x.ref for n, x in before.items()}
    hub.commit({"train.jsonl": b"other"}, branch="dev")
    assert graph(tmp_path, HUB_DATA)["data.d"].ref == before["data.d"].ref
    second = hub.commit({"train.jsonl": b"two"})
    after = graph(tmp_path, HUB_DATA, HUB_MODEL)
    assert after["data.d"].pins == {f"hf://datasets/{REPOSITORY}@main": second}
    assert all(after[name].ref != before[name].ref for name in before)


def test_a_commit_needs_no_hub(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    node = graph(tmp_path, HUB_DATA, f"data.d.source.revision={commit}")["data.d"]
    assert node.pins == {f"hf://datasets/{REPOSITORY}@{commit}": commit}


@pytest.mark.parametrize(
    ("override", "url"),
    [(HUB_DATA, f"data.d: hf://datasets/{REPOSITORY}@main"), (HUB_MODEL, f"base: hf://{REPOSITORY}@main")],
)
def test_offline_the_error_names_the_source_and_the_way_out(tmp_path: Path, override: str, url: str) -> None:
    message = rf"^{url}: the commit of revision `main` cannot be looked up \(.*offline.*\): give a commit of 40 digits"
    with pytest.raises(RecipeError, match=message):
        graph(tmp_path, override)


def test_a_revision_that_is_not_there(tmp_path: Path, hub: Hub) -> None:
    hub.commit({"train.jsonl": b"one"})
    with pytest.raises(RecipeError, match=r"@nowhere: the commit of revision `nowhere` cannot be looked up"):
        graph(tmp_path, HUB_DATA, "data.d.source.revision=nowhere")


@pytest.mark.parts
def test_changed_content_of_an_s3_object_is_another_key(tmp_path: Path, s3_store_url: str) -> None:
    url = f"{s3_store_url}/d.jsonl"
    _write(url, b'{"text": "one"}\n')
    before = graph(tmp_path, url=url)["data.d"]
    assert before.pins[url].startswith("ETag ")
    assert before.pins[url].endswith(", 16 bytes")
    _write(url, b'{"text": "one"}\n')
    assert graph(tmp_path, url=url)["data.d"].ref == before.ref
    _write(url, b'{"text": "two"}\n')
    assert graph(tmp_path, url=url)["data.d"].ref != before.ref


@pytest.mark.parts
def test_changed_files_of_an_s3_model_folder_are_another_key(tmp_path: Path, s3_store_url: str) -> None:
    url = f"{s3_store_url}/model"
    source = f"base.source={{type: folder, path: '{url}'}}"
    for name in ("config.json", "model.safetensors"):
        _write(f"{url}/{name}", b"one")
    before = graph(tmp_path, source)["base"]
    assert set(json.loads(before.pins[url])) == {"config.json", "model.safetensors"}
    _write(f"{url}/README.md", b"not part of the model")
    assert graph(tmp_path, source)["base"].ref == before.ref
    _write(f"{url}/model.safetensors", b"two")
    changed = graph(tmp_path, source)["base"]
    assert changed.ref != before.ref
    _write(f"{url}/tokenizer.json", b"new")
    assert graph(tmp_path, source)["base"].ref not in (before.ref, changed.ref)


@pytest.mark.parametrize("versions", ["ETag", "Last-Modified", "nothing"])
def test_changed_content_behind_https_is_another_key(tmp_path: Path, files: WebFiles, versions: str) -> None:
    files.versions = versions
    url = f"{files.url}/d.jsonl"
    before = graph(tmp_path, url=url)["data.d"].ref
    assert graph(tmp_path, url=url)["data.d"].ref == before
    files.contents["/d.jsonl"] = b"three\n"
    assert graph(tmp_path, url=url)["data.d"].ref != before


def test_what_is_not_copied_needs_a_version(tmp_path: Path, files: WebFiles) -> None:
    url = f"{files.url}/d.jsonl"
    before = graph(tmp_path, "data.d.source.streaming=true", url=url)["data.d"].ref
    assert before != graph(tmp_path, url=url)["data.d"].ref
    files.versions = "nothing"
    with pytest.raises(
        RecipeError, match=f"^data.d: {url}: its server reports no ETag or other version, by which a change "
    ):
        graph(tmp_path, "data.d.source.streaming=true", url=url)


def test_a_source_is_looked_up_once_in_a_plan(tmp_path: Path, files: WebFiles) -> None:
    url = f"{files.url}/d.jsonl"
    entry = f"{{format: text, source: {{type: files, paths: ['{url}']}}, exclude: [e]}}"
    twice = graph(tmp_path, f"data.d={entry}", f"data.e={entry.replace('exclude: [e]', 'limit: 1')}", url=url)
    assert twice["data.d"].pins == twice["data.e"].pins != {}
    assert files.requests == ["HEAD /d.jsonl"]


def test_sources_that_no_node_uses_are_not_looked_up(tmp_path: Path) -> None:
    unused = "data.e={format: text, source: {type: files, paths: ['http://127.0.0.1:9/d.jsonl']}}"
    assert [node.pins for node in graph(tmp_path, unused).values()] == [{}, {}, {}]


def test_what_cannot_be_reached_is_named(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/d.jsonl"
    with pytest.raises(
        RecipeError, match=rf"^data.d: {url}: .* cannot be read \(.*Connect call failed.*\): plan the run where"
    ):
        graph(tmp_path, url=url)


def test_a_plan_says_which_source_changed(tmp_path: Path, files: WebFiles, local_store_url: str) -> None:
    repository = ArtifactRepository(open_store(local_store_url))
    url = f"{files.url}/d.jsonl"
    loaded = load(tmp_path, url=url)
    _publish(build_graph(loaded, computing_libraries())["data.d"], repository, tmp_path / "made")
    assert _said(loaded, repository) == "reuse"
    files.contents["/d.jsonl"] = b"two\n"
    assert _said(loaded, repository) == f"the source {url} changed"
    local = load(tmp_path)
    assert _said(local, repository).startswith("source.paths: ")


def test_a_plan_says_that_an_older_result_was_not_pinned(tmp_path: Path, files: WebFiles, local_store_url: str) -> None:
    repository = ArtifactRepository(open_store(local_store_url))
    loaded = load(tmp_path, url=f"{files.url}/d.jsonl")
    node = build_graph(loaded, computing_libraries())["data.d"]
    _publish(node, repository, tmp_path / "made", key="0" * 64, pins={})
    assert _said(loaded, repository) == f"the source {files.url}/d.jsonl was not pinned before"


def _said(loaded: LoadedRecipe, repository: ArtifactRepository) -> str:
    node = next(node for node in planned(loaded, repository) if node.name == "data.d")
    return node.why if node.action == "compute" else node.action


def _publish(node: Node, repository: ArtifactRepository, folder: Path, **changes: object) -> None:
    folder.mkdir()
    (folder / "file").write_text("content")
    now = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    manifest = Manifest(
        kind=Kind.DATASET, name=node.name, stage=node.stage.name, key=node.ref.key, files=(), parents={},
        pins=dict(node.pins), config=node.config.model_dump(mode="json"), seed=0, code_revision="0",
        libraries=dict(node.libraries), device_seconds=0.0, device="cpu", started_at=now, finished_at=now,
    )  # fmt: skip
    repository.publish(manifest.model_copy(update=changes), folder)


def _write(url: str, content: bytes) -> None:
    filesystem, path = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    filesystem.pipe_file(path, content)
