"""What others, disks and old archives leave in a store: each reader says in one line which object is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.aliases import Alias, Evidence, moves_of, read_alias
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.leases import holder_of, lease_path
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.promotion import decision_on
from rlhf_core.artifacts.protection import read_protection
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path, manifest_path
from rlhf_core.artifacts.rounds import Rounds
from rlhf_core.artifacts.verification import repair, verify
from rlhf_core.errors import IntegrityError, StoreError
from rlhf_core.pipeline.record import read_record, read_start
from tests.rlhf_core.artifacts.manifests import manifest, published

REF = manifest("made").ref
CANDIDATE = Alias(
    manifest=REF, previous=None, by="", reason="", sequence=1, moved_at=datetime.now(UTC), evidence=Evidence(gate=REF)
)
Read = Callable[[ArtifactRepository], object]
READERS: dict[str, Read] = {
    manifest_path(REF): lambda repository: repository.stored_manifest(REF),
    f"{REF.path}/spec.json": lambda repository: repository.read_spec(REF),
    f"{REF.path}/checkpoints/000000000001-0123456789ab/manifest.json": lambda repository: raised(
        next(Checkpoints(repository.store, REF).newest())
    ),
    "aliases/bot/champion.json": lambda repository: read_alias(repository.store, "bot", "champion"),
    "registry/bot/moves/champion/000001.json": lambda repository: moves_of(repository.store, "bot", "champion"),
    "registry/bot/protection.json": lambda repository: read_protection(repository.store, "bot"),
    f"registry/bot/decisions/{REF.key}.json": lambda repository: decision_on(repository.store, "bot", CANDIDATE),
    "loops/bot/000001/end.json": lambda repository: Rounds(repository.store, "bot").end_of(1),
    "loops/bot/000001/start.json": lambda repository: Rounds(repository.store, "bot").start_of(1),
    "runs/one/run.json": lambda repository: read_record(repository.store, "one"),
    "runs/one/start.json": lambda repository: read_start(repository.store, "one"),
    f"{REF.path}/attempts/20260102T030405000000-a.json": lambda repository: Attempts(repository.store, REF).all(),
    lease_path(REF): lambda repository: holder_of(repository.store, REF),
}


def raised(found: object) -> object:
    if isinstance(found, Exception):
        raise found
    return found


@pytest.fixture
def repository(tmp_path: Path) -> ArtifactRepository:
    return ArtifactRepository(LocalStore(tmp_path / "store"))


@pytest.mark.parametrize("data", [b"", b"null", b'{"kind": "pol', b"\xff\xfe{}", b'{"a\\nb": 1}'])
@pytest.mark.parametrize("path", READERS)
def test_damaged_json_is_one_line_about_the_object(repository: ArtifactRepository, path: str, data: bytes) -> None:
    repository.store.put(path, data)
    with pytest.raises(IntegrityError) as caught:
        READERS[path](repository)
    said = str(caught.value)
    assert f"{path} is not " in said
    assert ("\n" in said, "http" in said, "pydantic" in said) == (False, False, False)


def changed(repository: ArtifactRepository, **values: Any) -> Manifest:
    made = manifest("made")
    text = json.loads(made.model_dump_json()) | values
    repository.store.put(manifest_path(made.ref), json.dumps(text).encode())
    return made


@pytest.mark.parametrize(
    "paths", [["a", "a/b"], ["./a/../b"], ["a\0b"], ["."], [""], ["a", "a"], ["/a"], ["../a"], ["a//b"], ["a/"]]
)
def test_files_without_a_place_of_their_own_are_refused_wherever_a_manifest_is_read(
    repository: ArtifactRepository, paths: list[str]
) -> None:
    digest = repository.put_blob(b"one")
    made = changed(repository, files=[{"path": path, "size": 3, "sha256": digest} for path in paths])
    (damage,) = verify(repository).damage
    assert damage.what.startswith("is not a manifest (files: ")
    for read in (repository.stored_manifest, lambda ref: repository.find(str(ref)), lambda _: list_all(repository)):
        with pytest.raises(IntegrityError, match="is not a manifest"):
            read(made.ref)


def list_all(repository: ArtifactRepository) -> list[Manifest]:
    return list(repository.list_artifacts())


def test_a_time_without_a_zone_is_damage(repository: ArtifactRepository) -> None:
    changed(repository, finished_at="2026-01-02T00:00:00")
    with pytest.raises(IntegrityError, match="finished_at: "):
        list_all(repository)


def test_odd_names_are_no_artifacts_and_no_rounds(repository: ArtifactRepository, tmp_path: Path) -> None:
    made = published(repository, tmp_path / "a", "one")
    rounds, checkpoint = ("loops/bot/abc/start.json", "loops/bot/7/start.json"), f"{made.ref.path}/checkpoints/abc"
    for path in ("stages/sft/xyz/manifest.json", *rounds, f"{checkpoint}/manifest.json"):
        repository.store.put(path, b"{}")
    assert Checkpoints(repository.store, made.ref).newest_step() is None
    assert list_all(repository) == [made]
    assert Rounds(repository.store, "bot").count() == 0
    repository.store.put("loops/bot/9999999999999/start.json", b"{}")
    assert Rounds(repository.store, "bot").ends() == []  # without asking for each number before


def test_a_store_that_is_a_file_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    store = LocalStore(tmp_path / "store")
    for read in (lambda: store.list("stages/"), lambda: store.get("a/b"), lambda: store.exists("a"), store.reach):
        with pytest.raises(StoreError, match="is a file, not a folder: correct ALIGNMENT_STORE"):
            read()


def test_a_folder_that_cannot_be_read_is_not_empty(repository: ArtifactRepository, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "stages").symlink_to("stages")  # as root, the one that cannot be listed
    with pytest.raises(StoreError, match="symbolic links"):
        repository.refs()


@pytest.mark.parametrize("what", ["pipe", "broken link", "link to itself"])
def test_a_manifest_that_is_no_file_is_damage_that_repair_moves(
    repository: ArtifactRepository, tmp_path: Path, what: str
) -> None:
    made = published(repository, tmp_path / "a", "one")
    file = tmp_path / "store" / manifest_path(made.ref)
    file.unlink()
    os.mkfifo(file) if what == "pipe" else file.symlink_to("nowhere" if what == "broken link" else file.name)
    (damage,) = verify(repository).damage
    said = {"pipe": "is a pipe", "broken link": "is a link to a file that is not there"}
    assert said.get(what, "is a link that leads to itself") in damage.what
    list(repair(repository, [damage], tmp_path / "cache"))
    assert verify(repository).damage == []


def test_a_blob_that_is_a_pipe_is_damage(repository: ArtifactRepository, tmp_path: Path) -> None:
    made = published(repository, tmp_path / "a", "one")
    file = tmp_path / "store" / blob_path(made.files[0].sha256)
    file.unlink()
    os.mkfifo(file)
    (damage,) = verify(repository).damage
    assert damage.what == "0 of 3 bytes"


@pytest.mark.parametrize("what", ["folder", "broken link"])
def test_a_name_that_is_taken_by_no_file_is_said(repository: ArtifactRepository, tmp_path: Path, what: str) -> None:
    made = published(repository, tmp_path / "a", "one")
    file = tmp_path / "store" / blob_path(made.files[0].sha256)
    file.unlink()
    file.mkdir() if what == "folder" else file.symlink_to("nowhere")
    (tmp_path / "cache" / "blobs").mkdir(parents=True)
    (tmp_path / "cache" / "blobs" / made.files[0].sha256).write_text("one")
    damage = verify(repository).damage
    with pytest.raises(StoreError, match="is a folder or a broken link where a file belongs: move it away"):
        list(repair(repository, damage, tmp_path / "cache"))
