"""`alignment gc`: what it says, and that nothing is deleted without --delete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository
from tests.rlhf_core.artifacts.manifests import published
from tests.services import S3Server

pytestmark = pytest.mark.parts


def gc(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["gc", *arguments])
    return done.exit_code, done.stdout + done.stderr


def test_it_says_what_may_go_and_why_the_rest_stays_and_deletes_only_when_told(
    s3_store_url: str, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", s3_store_url)
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    repository = ArtifactRepository(open_store(s3_store_url))
    kept, gone = (published(repository, tmp_path / name, name) for name in ("kept", "gone"))
    move_alias(repository.store, "bot", "best", kept.ref, by="a", reason="")
    with monkeypatch.context() as reader:
        for name, value in s3_server.reader().items():
            reader.setenv(name, value)
        code, said = gc("--verbose")
        assert code == 0, said
        code, refused = gc("--delete")
        assert (code, "error: " in refused) == (1, True), refused
    lines = [[cell.strip() for cell in line.split("\t")] for line in said.splitlines() if "\t" in line]
    assert [str(kept.ref), "alias bot/best"] in lines
    going = next(line for line in lines if line[0] == "policy")
    assert (going[1], going[3]) == ("1", "no alias, run, loop or job needs them, and they are older than 30d")
    assert "nothing was deleted; `--delete` deletes what may go" in said
    assert repository.manifest(gone.ref) is not None
    code, said = gc("--delete", "--json")
    assert code == 0, said
    told = json.loads(said)
    assert (told["going"]["policy"]["count"], told["deleted"]["count"]) == (1, 2)
    assert [m.name for m in repository.list_artifacts()] == ["kept"]


def test_a_kind_that_there_is_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    code, said = gc("--keep", "checkpoint=2d")
    assert (code, "did you mean `checkpoints`?" in said) == (1, True), said
