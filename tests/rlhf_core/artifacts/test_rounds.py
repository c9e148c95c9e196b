"""A loop's rounds in the store: one at a time, each finished once, whatever is killed in between."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts.aliases import read_alias
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.leases import Holder, Lease
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.rounds import RoundEnd, Rounds, RoundStart, Verdict
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import ConflictError
from tests.rlhf_core.artifacts.manifests import manifest, published
from tests.rlhf_core.artifacts.test_costs import START, attempt

pytestmark = pytest.mark.parts

MODEL, BETTER = (manifest(name).ref for name in ("model", "better"))
PROMPTS, RECORD = (ArtifactRef(stage=stage, key="3" * 64) for stage in ("round_prompts", "round"))


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> Store:
    """It has both models."""
    repository = ArtifactRepository(open_store(store_url))
    assert [published(repository, tmp_path / name, name).ref for name in ("model", "better")] == [MODEL, BETTER]
    return repository.store


@pytest.fixture
def rounds(store: Store) -> Rounds:
    return Rounds(store, "bot")


def started(rounds: Rounds, run_id: str = "run") -> RoundStart:
    start = rounds.current(run_id).model_copy(update={"prompts": PROMPTS})
    rounds.start(start)
    return start


def ended(rounds: Rounds, start: RoundStart, verdict: Verdict = "refused", run_id: str = "run") -> RoundEnd:
    end = RoundEnd(
        number=start.number, verdict=verdict, reason="", record=RECORD, candidate=BETTER, prompts=start.prompts,
        ended_at=datetime.now(UTC), run_id=run_id,
    )  # fmt: skip
    rounds.end(end)
    return end


def test_a_round_is_the_current_one_until_it_has_ended(rounds: Rounds) -> None:
    first = started(rounds)
    assert (first.number, first.accepted, first.previous_prompts) == (1, None, None)
    assert rounds.current("another run") == first
    end = ended(rounds, first)
    second = rounds.current()
    assert (second.number, second.accepted, second.previous_prompts, second.prompts) == (2, None, PROMPTS, None)
    assert rounds.ends() == [end]
    assert rounds.count() == 1  # the second is not stored


def test_a_round_whose_start_is_lost_is_no_other(rounds: Rounds, store: Store) -> None:
    """As after a partial restore: the next one would have its number and use its prompts again."""
    end = ended(rounds, started(rounds))
    store.delete("loops/bot/000001/start.json")
    current = rounds.current()
    assert (current.number, current.previous_prompts, rounds.ends()) == (2, PROMPTS, [end])


def test_a_round_starts_from_what_was_accepted(rounds: Rounds, store: Store) -> None:
    first = started(rounds)
    assert rounds.accept(first, BETTER, "better") == ""
    ended(rounds, first, "accepted")
    second = rounds.current()
    assert (second.accepted, second.alias_sequence) == (BETTER, 1)
    alias = read_alias(store, "bot", "accepted")
    assert alias is not None
    assert (alias.by, alias.reason) == ("round 1", "better")


def test_a_round_that_was_killed_after_it_moved_the_alias_moves_it_no_second_time(rounds: Rounds, store: Store) -> None:
    first = started(rounds)
    rounds.accept(first, BETTER, "better")
    assert rounds.accept(rounds.current("next run"), BETTER, "better") == ""
    alias = read_alias(store, "bot", "accepted")
    assert alias is not None
    assert alias.sequence == 1


def test_a_model_that_a_person_chose_meanwhile_stays(rounds: Rounds, store: Store) -> None:
    first = started(rounds)
    move_alias(store, "bot", "accepted", MODEL, by="ann", reason="rolled back")
    assert "since ann moved it (rolled back)" in rounds.accept(first, BETTER, "better")
    alias = read_alias(store, "bot", "accepted")
    assert alias is not None
    assert alias.manifest == MODEL


def test_a_round_starts_once_and_ends_once(rounds: Rounds) -> None:
    first = started(rounds)
    rounds.start(first)  # as the next run of an unfinished round does
    others = first.model_copy(update={"prompts": MODEL})  # of a recipe that was changed meanwhile
    rounds.start(others)
    assert rounds.current() == others
    with pytest.raises(ConflictError, match=r"started by another process \(run\)"):
        rounds.start(first.model_copy(update={"run_id": "another"}))
    end = ended(rounds, others)
    with pytest.raises(ConflictError):
        rounds.end(end.model_copy(update={"verdict": "accepted"}))
    rounds.end(end)  # its own write, whose answer was lost


def test_one_process_runs_a_round(rounds: Rounds) -> None:
    lease = rounds.take()
    assert isinstance(lease, Lease)
    assert isinstance(rounds.take(), Holder)
    with pytest.raises(ConflictError, match="a round of bot is running, in process"):
        rounds.skip("stuck")
    lease.release()
    again = rounds.take()
    assert isinstance(again, Lease)
    again.release()


def test_a_skipped_round_counts_no_prompts_that_it_never_had(rounds: Rounds) -> None:
    with pytest.raises(ConflictError, match="no round of bot has been started and has not ended"):
        rounds.skip("none")
    ended(rounds, started(rounds))
    second = rounds.current().model_copy(update={"prompts": ArtifactRef(stage="round_prompts", key="5" * 64)})
    rounds.start(second)
    skipped = rounds.skip("no pair")
    assert (skipped.number, skipped.verdict, skipped.reason, skipped.prompts) == (2, "skipped", "no pair", PROMPTS)
    assert rounds.current().number == 3


def test_a_round_has_the_attempts_at_all_its_nodes_since_its_start(rounds: Rounds, store: Store) -> None:
    """Also of settings that were corrected meanwhile, and of one that was given up."""
    first = rounds.current("run").model_copy(update={"started_at": START, "nodes": (MODEL,)})
    rounds.start(first)
    corrected = first.model_copy(update={"nodes": (MODEL, BETTER), "prompts": PROMPTS})
    rounds.start(corrected)
    assert rounds.current("another run") == corrected
    earlier = attempt("run", id="earlier", started_at=START - timedelta(hours=1))
    Attempts(store, MODEL).write(earlier)
    Attempts(store, MODEL).write(attempt("run", id="killed", outcome="killed"))
    Attempts(store, BETTER).write(attempt("another run", id="other"))
    Attempts(store, RECORD).write(attempt("run", id="of nobody"))
    assert [each.id for each in rounds.attempts(corrected)] == ["killed", "other"]
    end = rounds.skip("a bad reward server")
    assert [each.id for each in end.attempts or ()] == ["killed", "other"]
    assert rounds.end_of(1) == end
