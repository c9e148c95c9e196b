"""The commands of the registry, and what a recipe then starts from."""

from __future__ import annotations

import json
from getpass import getuser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.promotion import propose
from rlhf_core.artifacts.repository import ArtifactRepository
from tests.rlhf_core.artifacts.manifests import gate, published


class Store:
    def __init__(self, url: str, folder: Path):
        self.repository, self.folder = ArtifactRepository(open_store(url)), folder
        self.first, self.second = (published(self.repository, folder / name, name) for name in ("first", "second"))

    def call(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, arguments)
        return done.exit_code, (done.stdout or done.stderr).strip()

    def propose(self, approval: str | None = None) -> ArtifactRef:
        """A gate passes the second model against the first."""
        passed = gate(self.repository, self.folder / "gate", self.second.ref, self.first.ref, approval=approval)
        propose(self.repository.store, "bot", passed, by="run 1")
        return passed


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    url = str(tmp_path / "store")
    monkeypatch.setenv("ALIGNMENT_STORE", url)
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    return Store(url, tmp_path)


def test_an_alias_is_pointed_at_an_artifact_and_moved(store: Store) -> None:
    first, second = store.first, store.second
    assert store.call("alias", "bot/best", str(first.ref)) == (0, f"bot/best → {first.ref}")
    assert store.repository.find("best") == first
    moved = store.call("alias", "bot/best", str(second.ref), "--reason", "better")
    assert moved == (0, f"bot/best → {second.ref}, before {first.ref}")
    assert store.repository.find("bot/best") == second
    without = "error: `best`: give the model's name too, such as support-bot/best"
    assert store.call("alias", "best", str(first.ref)) == (1, without)


def test_a_champion_needs_a_gate_or_a_person(store: Store) -> None:
    first, second = str(store.first.ref), str(store.second.ref)
    code, said = store.call("alias", "bot/champion", first)
    assert (code, said.startswith("error: bot/champion is protected: it is moved by `alignment promote` after")) == (
        1,
        True,
    )
    assert store.call("alias", "bot/champion", first, "--approve-by", "eve", "--reason", "the first")[0] == 0
    assert store.call("promote", "bot")[1].startswith("error: bot has no candidate")
    passed = store.propose()
    code, said = store.call("promote", "bot")
    assert code == 0
    assert said.endswith(f"bot/champion → {second}, before {first}")
    assert f"no evaluation compares {second} with champion {first}" in said
    assert store.call("promote", "bot") == (0, "bot/champion is the candidate already")
    assert store.call("rollback", "bot", "--reason", "it is rude") == (0, f"bot/champion → {first}, before {second}")
    assert store.call("rollback", "bot")[0] == 1

    code, said = store.call("log", "bot/champion")
    rows = [line.split("\t") for line in said.splitlines()[1:]]
    assert [(row[2], row[3], row[4], row[6], row[7]) for row in rows] == [
        ("3", second, first, "back to move 1", "it is rude"),
        ("2", first, second, f"gate {passed}", "exact: +0.1"),
        ("1", "", first, "approved by eve", "the first"),
    ]  # fmt: skip
    assert {row[5] for row in rows} == {getuser()}


def test_what_waits_is_approved_or_rejected(store: Store) -> None:
    second = str(store.second.ref)
    store.call("alias", "bot/champion", str(store.first.ref), "--approve-by", "eve", "--reason", "the first")
    store.propose(approval="required")
    code, said = store.call("log")
    assert code == 0
    assert said.endswith(f"alignment approve bot --candidate {second}")
    assert store.call("reject", "bot", "--reason", "rude", "--candidate", str(store.first.ref))[0] == 1
    code, said = store.call("approve", "bot", "--candidate", second, "--by", "eve", "--reason", "read \x1b[31m them")
    assert (code, said.splitlines()[-1]) == (0, f"bot/champion → {second}, before {store.first.ref}")
    assert store.call("log")[1].startswith("no candidate waits for approval")
    assert r"read \x1b[31m them" in store.call("log", "bot")[1]
    assert store.call("reject", "bot", "--reason", "rude")[1].endswith(
        "was approved by eve (read \\x1b[31m them) before"
    )


def test_protection_is_set_and_ended_for_a_reason(store: Store) -> None:
    assert store.call("protect", "bot/best") == (0, "bot/best is protected")
    assert store.call("alias", "bot/best", str(store.first.ref))[0] == 1
    assert store.call("protect", "bot/best", "--off")[0] == 1
    assert store.call("protect", "bot/best", "--off", "--reason", "a test") == (0, "bot/best is no longer protected")
    assert store.call("alias", "bot/best", str(store.first.ref))[0] == 0
    assert f"bot/best no longer protected by {getuser()} (a test)" in store.call("log", "bot")[1]
    wrong = "error: no alias bto has been set (did you mean `bot`?): `alignment alias bto/champion ARTIFACT` does"
    assert store.call("log", "bto") == (1, wrong)


def test_what_has_no_history_is_said_in_a_sentence(store: Store) -> None:
    assert store.call("log") == (
        0, "no candidate waits for approval: `alignment log MODEL` prints the history of a model"
    )  # fmt: skip
    assert store.call("alias") == (0, "there is no alias yet: `alignment alias MODEL/ALIAS ARTIFACT` sets one")
    assert store.call("log", "bot")[1] == (
        "error: no alias bot has been set: `alignment alias bot/champion ARTIFACT` does"
    )
    store.call("protect", "bot/best")
    (line,) = store.call("log", "bot")[1].splitlines()
    assert line.endswith(f" bot/best protected by {getuser()}")


def test_moves_and_decisions_are_documents(store: Store) -> None:
    first, second = store.first.ref, store.second.ref

    def document(*arguments: str) -> Any:
        code, said = store.call(*arguments, "--json")
        assert code == 0, said
        return json.loads(said)

    document("alias", "bot/champion", str(first), "--approve-by", "eve", "--reason", "the first")
    passed = store.propose(approval="required")
    (asked,) = document("log")["waiting"]
    assert (asked["alias"], asked["artifact"]) == ("bot/candidate", second.full)
    moved = document("approve", "bot", "--by", "eve")
    assert (moved["alias"]["artifact"], moved["moved"], moved["differences"]) == (second.full, True, [])
    again = document("promote", "bot")
    assert (again["alias"]["artifact"], again["moved"]) == (second.full, False)
    assert document("protect", "bot/best") == {"alias": "bot/best", "protected": True, "changed": True}
    log = document("log", "bot/champion")
    assert [(move["number"], move["gate"], move["approved_by"]) for move in log["moves"]] == [
        (2, passed.full, "eve"), (1, None, "eve"),
    ]  # fmt: skip
    assert (log["waiting"], log["protections"]) == ([], [])
    assert document("rollback", "bot")["aliases"][0]["artifact"] == first.full
