"""From a passed gate to the champion: once each, by one process, and with a person where the gate asks for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from rlhf_core.artifacts.aliases import Alias, Evidence, moves_of, read_alias
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.promotion import Decision, approve, promote, propose, reject, waiting
from rlhf_core.artifacts.registry import move_alias, roll_back
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError, StoreError
from tests.rlhf_core.artifacts.manifests import gate, published

pytestmark = pytest.mark.parts

MODEL = "bot"


class Registry:
    """A champion `a`, and gates of candidates against it."""

    def __init__(self, store: Store, folder: Path):
        self.store, self.repository, self.folder = store, ArtifactRepository(store), folder
        self.champion = self.model("a")
        self.point_champion(self.champion)

    def model(self, name: str) -> ArtifactRef:
        return published(self.repository, self.folder / "models" / name, name).ref

    def point_champion(self, to: ArtifactRef) -> None:
        evidence = Evidence(approved_by="eve")
        move_alias(self.store, MODEL, "champion", to, by="eve", reason="by hand", evidence=evidence)

    def gate(self, candidate: ArtifactRef, approval: str | None = None, passed: bool = True) -> ArtifactRef:
        folder = self.folder / f"gate {candidate.key[:8]}"
        return gate(self.repository, folder, candidate, self.champion, passed=passed, approval=approval)

    def read(self, alias: str) -> ArtifactRef | None:
        found = read_alias(self.store, MODEL, alias)
        return None if found is None else found.manifest


@pytest.fixture
def registry(local_store_url: str, tmp_path: Path) -> Registry:
    return Registry(open_store(local_store_url), tmp_path)


def test_a_passed_gate_makes_a_candidate_which_is_promoted(registry: Registry) -> None:
    store, better = registry.store, registry.model("b")
    with pytest.raises(StoreError, match="bot has no candidate: a stage `gate` with `model: bot` moves"):
        promote(store, MODEL, by="ann", reason="")
    passed = registry.gate(better)
    propose(store, MODEL, passed, by="run 1")
    moved = promote(store, MODEL, by="ann", reason="")
    assert moved is not None
    assert (moved.manifest, moved.previous, moved.evidence) == (better, registry.champion, Evidence(gate=passed))
    assert (moved.by, moved.reason) == ("ann", "exact: +0.1")
    assert promote(store, MODEL, by="ann", reason="") is None
    assert promote(store, MODEL, "staging", by="ann", reason="") is not None


def test_a_refused_gate_makes_no_candidate(registry: Registry) -> None:
    refused = registry.gate(registry.model("b"), passed=False)
    with pytest.raises(StoreError, match="refused it"):
        propose(registry.store, MODEL, refused, by="run 1")
    assert registry.read("candidate") is None


def test_a_gate_makes_a_candidate_once_also_if_its_run_is_repeated_after_another_one(registry: Registry) -> None:
    other = registry.model("c")
    first, second = registry.gate(registry.model("b")), registry.gate(other)
    move = propose(registry.store, MODEL, first, by="run 1")
    assert propose(registry.store, MODEL, first, by="run 1") == move
    propose(registry.store, MODEL, second, by="run 2")
    assert propose(registry.store, MODEL, first, by="run 3") == move
    assert registry.read("candidate") == other
    assert len(moves_of(registry.store, MODEL, "candidate")) == 2


def test_a_candidate_that_was_promoted_and_rolled_back_is_not_promoted_again(registry: Registry) -> None:
    propose(registry.store, MODEL, registry.gate(registry.model("b")), by="run 1")
    promote(registry.store, MODEL, by="ann", reason="")
    roll_back(registry.store, MODEL, by="bob", reason="it is rude")
    with pytest.raises(StoreError, match="moved back since"):
        promote(registry.store, MODEL, by="ann", reason="")
    assert registry.read("champion") == registry.champion
    assert promote(registry.store, MODEL, by="ann", reason="it is not", approved_by="eve") is not None


def test_a_champion_that_was_moved_since_the_gate_is_not_replaced(registry: Registry) -> None:
    propose(registry.store, MODEL, registry.gate(registry.model("b"), approval="required"), by="run 1")
    registry.point_champion(registry.model("c"))
    with pytest.raises(StoreError, match=r"compared .* with .*, and bot/champion is"):
        promote(registry.store, MODEL, by="ann", reason="")
    with pytest.raises(StoreError, match=r"was compared with .*, and bot/champion is .* since: run the recipe again"):
        approve(registry.store, MODEL, by="ann", approved_by="eve", reason="")
    assert waiting(registry.store, MODEL) is not None


class TestApproval:
    @pytest.fixture(autouse=True)
    def asked(self, registry: Registry) -> None:
        self.registry, self.store = registry, registry.store
        self.candidate = registry.model("b")
        self.gate = registry.gate(self.candidate, approval="required")
        self.move = propose(self.store, MODEL, self.gate, by="run 1")

    def approve(self, expected: ArtifactRef | None = None) -> Alias:
        return approve(self.store, MODEL, by="ann", approved_by="eve", reason="", expected=expected)

    def reject(self) -> Decision:
        return reject(self.store, MODEL, by="bob", reason="it is rude")

    def test_the_candidate_waits_until_it_is_approved(self) -> None:
        assert waiting(self.store, MODEL) == self.move
        with pytest.raises(StoreError, match="needs a person too: `alignment approve bot`"):
            promote(self.store, MODEL, by="ann", reason="")
        moved = self.approve()
        assert (moved.manifest, moved.by) == (self.candidate, "ann")
        assert moved.evidence == Evidence(gate=self.gate, approved_by="eve")
        assert waiting(self.store, MODEL) is None
        with pytest.raises(StoreError, match=r"is .* already"):
            self.approve()

    def test_a_rejected_candidate_is_neither_approved_nor_promoted(self) -> None:
        with pytest.raises(StoreError, match="a rejection needs a reason"):
            reject(self.store, MODEL, by="bob", reason=" ")
        decision = self.reject()
        assert self.reject() == decision
        assert waiting(self.store, MODEL) is None
        with pytest.raises(ConflictError, match=r"was rejected by bob \(it is rude\) before"):
            self.approve()
        with pytest.raises(StoreError, match=r"was rejected by bob \(it is rude\)"):
            promote(self.store, MODEL, by="ann", reason="but I want it", approved_by="ann")
        assert self.registry.read("champion") == self.registry.champion

    def test_an_approval_that_was_killed_before_the_move_is_completed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("rlhf_core.artifacts.promotion.move_alias", killed)
            with pytest.raises(KeyboardInterrupt):
                self.approve()
        assert self.registry.read("champion") == self.registry.champion
        with pytest.raises(ConflictError, match="was approved by eve"):
            self.reject()
        assert self.approve().manifest == self.candidate

    def test_another_candidate_than_was_looked_at_is_not_approved(self) -> None:
        other = self.registry.model("c")
        propose(self.store, MODEL, self.registry.gate(other, approval="required"), by="run 2")
        with pytest.raises(StoreError, match=f"candidate is {other} now, and no longer {self.candidate}"):
            self.approve(self.candidate)
        assert self.approve(other).manifest == other

    def test_an_approval_counts_once(self) -> None:
        self.approve()
        roll_back(self.store, MODEL, by="bob", reason="it is rude")
        with pytest.raises(StoreError, match="by this approval, and was moved back since"):
            self.approve()


def test_a_candidate_that_no_gate_asked_a_person_for_waits_for_nobody(registry: Registry) -> None:
    propose(registry.store, MODEL, registry.gate(registry.model("b")), by="run 1")
    assert waiting(registry.store, MODEL) is None
    with pytest.raises(StoreError, match="needs no approval: `alignment promote bot` promotes it"):
        approve(registry.store, MODEL, by="ann", approved_by="eve", reason="")


def at_once(count: int, act: Callable[[int], bool]) -> list[bool]:
    """The result of each call, all of which start together."""
    barrier = threading.Barrier(count)

    def call(number: int) -> bool:
        barrier.wait()
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


def promoted(stores: list[Store], seen: int, models: list[ArtifactRef], number: int) -> bool:
    """Whether this promoter, who has seen the move `seen`, has moved the champion."""
    try:
        move_alias(
            stores[number], MODEL, "champion", models[number % len(models)],
            by="ann", reason="race", seen=seen, evidence=Evidence(approved_by="eve"),
        )  # fmt: skip
    except ConflictError:
        return False
    return True


def race_for_the_champion(url: str, folder: Path, promoters: int, rounds: int) -> None:
    """Each promoter has the store open for itself; in each round all have seen the same champion."""
    stores = [open_store(url) for _ in range(promoters)]
    registry = Registry(stores[0], folder)
    models = [registry.model(name) for name in "bc"]
    for seen in range(1, rounds + 1):
        assert at_once(promoters, partial(promoted, stores, seen, models)).count(True) == 1
    moves = moves_of(registry.store, MODEL, "champion")
    assert [move.sequence for move in moves] == list(range(rounds + 1, 0, -1))
    assert len({move.id for move in moves}) == rounds + 1
    assert [later.previous for later in moves[:-1]] == [earlier.manifest for earlier in moves[1:]]


def test_of_promoters_that_have_seen_the_same_champion_one_wins(store_url: str, tmp_path: Path) -> None:
    race_for_the_champion(store_url, tmp_path, promoters=4, rounds=2)


@pytest.mark.endurance("mutations")
@pytest.mark.slow("twelve promoters, for whom the S3 server makes pauses of a second")
def test_of_twelve_promoters_one_wins(store_url: str, tmp_path: Path) -> None:
    race_for_the_champion(store_url, tmp_path, promoters=12, rounds=20 if store_url.startswith("s3:") else 100)


def test_of_an_approval_and_a_rejection_at_once_one_counts(local_store_url: str, tmp_path: Path) -> None:
    registry = Registry(open_store(local_store_url), tmp_path)
    propose(registry.store, MODEL, registry.gate(registry.model("b"), approval="required"), by="run 1")

    def decide(number: int) -> bool:
        store = open_store(local_store_url)
        try:
            if number % 2:
                approve(store, MODEL, by="ann", approved_by="eve", reason="")
            else:
                reject(store, MODEL, by="bob", reason="rude")
        except StoreError:
            return False
        return True

    approved_or_rejected = at_once(2, decide)
    assert approved_or_rejected.count(True) == 1
    assert (registry.read("champion") == registry.champion) == approved_or_rejected[0]


def test_runs_that_propose_the_same_gate_at_once_move_the_candidate_once(local_store_url: str, tmp_path: Path) -> None:
    registry = Registry(open_store(local_store_url), tmp_path)
    passed = [registry.gate(registry.model(name)) for name in "bc"]

    def proposed(number: int) -> bool:
        propose(open_store(local_store_url), MODEL, passed[number % 2], by=f"run {number}")
        return True

    at_once(6, proposed)
    made = [move.evidence.gate for move in moves_of(registry.store, MODEL, "candidate")]
    assert len(made) == 2
    assert set(made) == set(passed)
