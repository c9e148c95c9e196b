"""`alignment alias`, and what a recipe then starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from tests.rlhf_core.artifacts.manifests import published


def test_an_alias_is_pointed_at_an_artifact_and_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = str(tmp_path / "store")
    monkeypatch.setenv("ALIGNMENT_STORE", store)
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    repository = ArtifactRepository(open_store(store))
    first, second = (published(repository, tmp_path / name, name) for name in ("first", "second"))

    def alias(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["alias", *arguments])
        return done.exit_code, (done.stdout or done.stderr).strip()

    assert alias("bot/champion", str(first.ref)) == (0, f"bot/champion → {first.ref}")
    assert repository.find("champion") == first
    moved = alias("bot/champion", str(second.ref), "--reason", "better")
    assert moved == (0, f"bot/champion → {second.ref}, before {first.ref}")
    assert repository.find("bot/champion") == second
    without = "error: `champion`: give the model's name too, such as support-bot/champion"
    assert alias("champion", str(first.ref)) == (1, without)
