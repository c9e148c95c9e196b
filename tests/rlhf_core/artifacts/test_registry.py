"""The history of an alias, rollbacks, and what a protected alias needs to be moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.artifacts.aliases import Alias, Evidence, alias_path, move_path, moves_of, read_alias
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.protection import protect, read_protection
from rlhf_core.artifacts.registry import move_alias, roll_back
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError, IntegrityError, StoreError
from tests.rlhf_core.artifacts.manifests import gate, published

pytestmark = pytest.mark.parts

MODEL = "bot"


@pytest.fixture
def repository(local_store_url: str) -> ArtifactRepository:
    return ArtifactRepository(open_store(local_store_url))


@pytest.fixture
def models(repository: ArtifactRepository, tmp_path: Path) -> dict[str, ArtifactRef]:
    return {name: published(repository, tmp_path / name, name).ref for name in "abcd"}


def move(store: Store, to: ArtifactRef, alias: str = "best", seen: int | None = None, **evidence: object) -> Alias:
    given = Evidence.model_validate(evidence)
    return move_alias(store, MODEL, alias, to, by="ann", reason="better", seen=seen, evidence=given)


def back(store: Store, alias: str = "best") -> ArtifactRef:
    return roll_back(store, MODEL, alias, by="bob", reason="").manifest


def history(store: Store, alias: str = "best") -> list[tuple[int, ArtifactRef]]:
    return [(each.sequence, each.manifest) for each in moves_of(store, MODEL, alias)]


def test_every_move_is_kept(store_url: str, tmp_path: Path) -> None:
    store = open_store(store_url)
    refs = [published(ArtifactRepository(store), tmp_path / name, name).ref for name in "abc"]
    moves = [move(store, ref, approved_by="eve") for ref in refs]
    assert moves_of(store, MODEL, "best") == moves[::-1]
    assert [each.previous for each in moves] == [None, *refs[:2]]
    assert moves[2].evidence == Evidence(approved_by="eve")


@pytest.mark.parametrize("killed_at", ["keep", "swap"])
def test_a_move_that_is_killed_is_neither_lost_nor_invented(
    repository: ArtifactRepository,
    models: dict[str, ArtifactRef],
    monkeypatch: pytest.MonkeyPatch,
    killed_at: str,
) -> None:
    store = repository.store
    move(store, models["a"])
    before = moves_of(store, MODEL, "best")
    method = {"keep": "put_if_absent", "swap": "replace"}[killed_at]
    with monkeypatch.context() as patched:
        patched.setattr(type(store), method, killed)
        with pytest.raises(KeyboardInterrupt):
            move(store, models["b"])
    assert moves_of(store, MODEL, "best") == before
    assert store.exists(move_path(MODEL, "best", 1)) == (killed_at == "swap")
    move(store, models["c"])  # another process has decided otherwise since
    assert history(store) == [(2, models["c"]), (1, models["a"])]


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_move_whose_answer_was_lost_was_made_also_if_it_was_moved_on_since(
    repository: ArtifactRepository, models: dict[str, ArtifactRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = repository.store
    move(store, models["a"])
    replace = type(store).replace

    def lose_the_answer(self: Store, path: str, data: bytes, tag: str) -> None:
        replace(self, path, data, tag)
        monkeypatch.undo()
        move(store, models["c"])
        raise ConflictError("it was retried")

    monkeypatch.setattr(type(store), "replace", lose_the_answer)
    assert move(store, models["b"]).sequence == 2
    assert history(store) == [(3, models["c"]), (2, models["b"]), (1, models["a"])]


def test_an_alias_that_was_deleted_goes_on_counting(
    repository: ArtifactRepository, models: dict[str, ArtifactRef]
) -> None:
    store = repository.store
    for name in "ab":
        move(store, models[name])
    store.delete(alias_path(MODEL, "best"))
    move(store, models["c"], seen=0)
    move(store, models["d"])
    assert history(store) == [(3, models["d"]), (2, models["c"]), (1, models["a"])]


def test_a_kept_move_is_never_overwritten(repository: ArtifactRepository, models: dict[str, ArtifactRef]) -> None:
    store = repository.store
    move(store, models["a"])
    store.put(move_path(MODEL, "best", 1), b"{}")
    with pytest.raises(IntegrityError, match=r"moves/best/000001\.json holds another move than expected, so the"):
        move(store, models["b"])
    assert store.get(move_path(MODEL, "best", 1)) == b"{}"


def old_document(store: Store, alias: str, to: ArtifactRef, previous: ArtifactRef) -> None:
    """As a release without a history wrote it."""
    fields = {
        "manifest": to.model_dump(), "previous": previous.model_dump(), "by": "ann", "reason": "",
        "sequence": 5, "moved_at": "2026-01-02T00:00:00Z",
    }  # fmt: skip
    store.put(alias_path(MODEL, alias), json.dumps(fields).encode())


def test_rollbacks_go_further_back_and_do_not_oscillate(
    repository: ArtifactRepository, models: dict[str, ArtifactRef]
) -> None:
    store = repository.store
    for name in "abbc":
        move(store, models[name])
    assert [back(store), back(store)] == [models["b"], models["a"]]
    with pytest.raises(StoreError, match="no model is known that bot/best pointed at before"):
        back(store)
    move(store, models["d"])
    assert back(store) == models["a"]
    with pytest.raises(StoreError, match="no model is known"):
        back(store)
    assert [each.evidence.restores for each in moves_of(store, MODEL, "best")][:4] == [1, None, 1, 3]


def test_an_alias_of_a_release_without_a_history_goes_back_one_step(
    repository: ArtifactRepository, models: dict[str, ArtifactRef]
) -> None:
    store = repository.store
    old_document(store, "best", models["b"], models["a"])
    assert history(store) == [(5, models["b"])]
    move(store, models["c"], seen=5)
    assert [back(store), back(store)] == [models["b"], models["a"]]
    with pytest.raises(StoreError, match="no model is known"):
        back(store)


def test_a_rollback_to_a_model_that_is_gone_is_refused(
    repository: ArtifactRepository, models: dict[str, ArtifactRef]
) -> None:
    for name in "ab":
        move(repository.store, models[name])
    repository.store.delete(f"{models['a'].path}/manifest.json")
    with pytest.raises(StoreError, match="is gone from the store"):
        back(repository.store)
    with pytest.raises(StoreError, match="there is no alias bot/other"):
        back(repository.store, "other")


class TestChampion:
    """It is protected by default."""

    @pytest.fixture(autouse=True)
    def champion(
        self, repository: ArtifactRepository, models: dict[str, ArtifactRef], tmp_path: Path
    ) -> ArtifactRepository:
        self.repository, self.store, self.models, self.folder = repository, repository.store, models, tmp_path
        move(self.store, models["a"], "champion", approved_by="eve")
        return repository

    def gate(self, name: str, candidate: str, baseline: str, **verdict: object) -> ArtifactRef:
        models = self.models
        return gate(self.repository, self.folder / name, models[candidate], models[baseline], **verdict)  # type: ignore[arg-type]

    def refused(self, message: str, to: str = "b", **evidence: object) -> None:
        before = read_alias(self.store, MODEL, "champion")
        with pytest.raises(StoreError, match=message):
            move(self.store, self.models[to], "champion", **evidence)
        assert read_alias(self.store, MODEL, "champion") == before

    def test_it_moves_after_a_gate_of_this_model_against_the_champion(self) -> None:
        passed = self.gate("passed", "b", "a")
        assert move(self.store, self.models["b"], "champion", gate=passed).evidence.gate == passed

    def test_it_does_not_move_without(self) -> None:
        self.refused("bot/champion is protected: .*; for sft/.* there is no such evidence")
        self.refused("refused it", gate=self.gate("refused", "b", "a", passed=False))
        self.refused(f"is of {self.models['c']}", gate=self.gate("of another", "c", "a"))
        self.refused("compared .* with .*, and bot/champion is", gate=self.gate("against another", "b", "c"))
        self.refused(
            "needs a person too: `alignment approve bot`", gate=self.gate("ask", "b", "a", approval="required")
        )
        self.refused("is a policy, not a gate's verdict", gate=self.models["b"])
        self.refused("was not to", restores=1)
        self.refused("an approval needs a name and a reason", approved_by="  ")

    def test_a_gate_moves_it_once(self) -> None:
        passed = self.gate("passed", "b", "a")
        move(self.store, self.models["b"], "champion", gate=passed)
        assert back(self.store, "champion") == self.models["a"]
        self.refused(r"by gate/\w+ the alias was moved before \(move 2\), and moved back since", gate=passed)
        move(self.store, self.models["b"], "champion", gate=passed, approved_by="eve")

    def test_protection_is_of_the_store(self) -> None:
        with pytest.raises(StoreError, match="give a reason by --reason"):
            protect(self.store, MODEL, "champion", protected=False, by="ann", reason=" ")
        assert protect(self.store, MODEL, "best", protected=True, by="ann", reason="")
        assert not protect(self.store, MODEL, "best", protected=True, by="ann", reason="")
        assert protect(self.store, MODEL, "champion", protected=False, by="ann", reason="a test")
        move(self.store, self.models["b"], "champion")
        with pytest.raises(StoreError, match="bot/best is protected"):
            move(self.store, self.models["b"], "best")
        with pytest.raises(StoreError, match="gates must move"):
            protect(self.store, MODEL, "candidate", protected=True, by="ann", reason="")
        changes = read_protection(self.store, MODEL).changes
        assert [(each.alias, each.protected, each.reason) for each in changes] == [
            ("best", True, ""), ("champion", False, "a test"),
        ]  # fmt: skip
