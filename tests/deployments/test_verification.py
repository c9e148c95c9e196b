"""`alignment verify` and `repair` as a user sees them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.artifacts.manifest import Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path
from rlhf_core.pipeline.record import NodeRecord, RunRecord, write_record
from tests.rlhf_core.artifacts.manifests import published

pytestmark = pytest.mark.parts


@pytest.fixture
def stored(
    local_store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ArtifactRepository, Manifest]:
    """A store with one artifact, made by the run `r1`, one of whose blobs has a flipped bit."""
    monkeypatch.setenv("ALIGNMENT_STORE", local_store_url)
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    repository = ArtifactRepository(open_store(local_store_url))
    made, _ = published(repository, tmp_path / "a", "one"), published(repository, tmp_path / "b", "whole")
    now = datetime(2026, 1, 2, tzinfo=UTC)
    nodes = (NodeRecord(name="sft", ref=made.ref, outcome="computed"),)
    record = RunRecord(
        run_id="r1", recipe={"name": "tiny"}, overrides=("sft.epochs=2",), started_at=now, finished_at=now, nodes=nodes
    )
    write_record(repository.store, record)
    repository.store.put(blob_path(made.files[0].sha256), b"oni")
    return repository, made


def test_damage_is_shown_asked_about_taken_out_of_use_and_computed_again_by_the_run(
    stored: tuple[ArtifactRepository, Manifest], tmp_path: Path
) -> None:
    repository, made = stored
    path, runner = blob_path(made.files[0].sha256), CliRunner()
    for ref in ([], [str(made.ref)], ["r1"]):
        found = runner.invoke(app, ["verify", *ref])
        assert found.exit_code == 1
        assert f"{path}" in found.output
        assert "other content" in found.output
        assert "error: 1 object damaged: `alignment repair` takes" in found.output
    unanswered = runner.invoke(app, ["repair"], input="")
    assert (unanswered.exit_code, "stdin is closed: pass --yes. Nothing was changed." in unanswered.output) == (1, True)
    for arguments, answer in ((["--dry-run"], ""), ([], "n\n")):
        done = runner.invoke(app, ["repair", *arguments], input=answer)
        assert done.exit_code == 0
        assert repository.store.get(path) == b"oni"
    done = runner.invoke(app, ["repair", "--yes"])
    assert f"{path}: moved to damaged/{path}" in done.output
    assert f"{made.ref} will be computed again by `alignment run tiny sft.epochs=2` (run r1)" in done.output
    assert repository.manifest(made.ref) is None
    gone = runner.invoke(app, ["verify"])
    assert (gone.exit_code, "error: 1 object missing: `alignment repair` puts back" in gone.output) == (1, True)
    published(repository, tmp_path / "again", "one")
    whole = runner.invoke(app, ["verify"])
    assert (whole.exit_code, "2 artifacts, 2 blobs, 8 bytes read: all whole" in whole.output) == (0, True)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nothing", "is empty: correct ALIGNMENT_STORE, or run a recipe first"),
        ("a file", "is a file, not a folder: correct ALIGNMENT_STORE"),
        ("nothing ", "begins or ends with a space: remove that"),
    ],
)
def test_what_is_no_store_is_not_called_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, sentence: str
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("ALIGNMENT_STORE", f"{tmp_path}/{url}")
    done = CliRunner().invoke(app, ["verify"])
    assert (done.exit_code, sentence in done.output) == (1, True)
