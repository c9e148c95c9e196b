"""Costs of a loop: each round once, of whatever release, also one that was given up or runs now."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundEnd, Rounds
from rlhf_core.pipeline.round_costs import loop_attempts
from tests.rlhf_core.artifacts.manifests import manifest
from tests.rlhf_core.artifacts.test_costs import START, attempt

SFT, DPO = (ArtifactRef(stage=stage, key="1" * 64) for stage in ("sft", "preference"))


def begin(rounds: Rounds, hour: int, *nodes: ArtifactRef) -> None:
    rounds.start(rounds.current("r").model_copy(update={"started_at": START + timedelta(hours=hour), "nodes": nodes}))


def write(store: LocalStore, ref: ArtifactRef, name: str, hour: int) -> None:
    began = START + timedelta(hours=hour, minutes=1)
    Attempts(store, ref).write(attempt("r", id=name, started_at=began, seen_at=began))


def test_each_attempt_of_a_loop_counts_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    rounds, repository = Rounds(store, "bot"), ArtifactRepository(store)
    write(store, SFT, "before the loop", -1)
    begin(rounds, 0, SFT, DPO)
    write(store, SFT, "first", 0)
    rounds.skip("no pairs")
    begin(rounds, 1, SFT)
    write(store, SFT, "second", 1)
    rounds.skip("no pairs")
    store.delete(next(path for path in store.list(f"{SFT.path}/attempts/") if path.endswith("first.json")))
    begin(rounds, 2, SFT, DPO)
    write(store, DPO, "third", 2)
    assert [each.id for each in loop_attempts(repository, rounds)] == ["first", "second", "third"]


def test_a_round_of_an_earlier_release_has_the_attempts_at_what_its_record_was_made_of(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    rounds, repository = Rounds(store, "bot"), ArtifactRepository(store)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "verdict.json").touch()
    record = repository.publish(manifest("record", finished_at=START + timedelta(hours=1)), tmp_path / "files")
    begin(rounds, 0)
    Attempts(store, record.ref).write(attempt("r", id="of the record", started_at=START, seen_at=START))
    Attempts(store, record.ref).write(attempt("r", id="old", started_at=START - timedelta(1), seen_at=START))
    rounds.end(
        RoundEnd(
            number=1, verdict="refused", reason="", record=record.ref, candidate=None, prompts=None, ended_at=START,
            run_id="r",
        )
    )  # fmt: skip
    assert [each.id for each in loop_attempts(repository, rounds)] == ["of the record"]
