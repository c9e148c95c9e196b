"""What a garbage collection deletes and keeps, also when it is killed, or something is needed at the same moment."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.artifacts import deletions as fence
from rlhf_core.artifacts.aliases import Evidence
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.checkpoints import Checkpoint, Checkpoints
from rlhf_core.artifacts.deletions import DELETING, Deletions
from rlhf_core.artifacts.job_logs import write_log
from rlhf_core.artifacts.leases import Lease, lease_path, take_lease
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef, Kind, Manifest
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.promotion import approve, promote, propose, reject
from rlhf_core.artifacts.registry import move_alias
from rlhf_core.artifacts.repository import ArtifactRepository, blob_path, manifest_path
from rlhf_core.artifacts.resources import uses_path
from rlhf_core.artifacts.rounds import RoundEnd, Rounds
from rlhf_core.artifacts.spec import StageSpec
from rlhf_core.artifacts.store import Entries, Store
from rlhf_core.errors import IntegrityError, StoreError
from rlhf_core.garbage.collection import GarbageCollection
from rlhf_core.garbage.keep import Keep, described, parse_keep
from rlhf_core.pipeline.record import NodeRecord, RunRecord, write_needs, write_record
from tests.rlhf_core.artifacts.manifests import gate, manifest, published
from tests.rlhf_core.artifacts.test_costs import attempt

pytestmark = pytest.mark.parts

NOTHING = parse_keep(["artifacts=0m", "checkpoints=0m", "blobs=0m", "rollouts=0m", "policies=0m", "runs=90d"])
LONG_AGO = datetime(2026, 1, 2, tzinfo=UTC)


def collected(store: Store, keep: Keep = NOTHING) -> int:
    """Collects as `alignment gc --delete` does; returns the number of deleted objects."""
    collection = GarbageCollection(store, keep)
    return collection.delete(collection.plan()).count


def record(run_id: str, *refs: ArtifactRef, finished_at: datetime) -> RunRecord:
    nodes = tuple(NodeRecord(name="n", ref=ref, outcome="computed") for ref in refs)
    return RunRecord(
        run_id=run_id, recipe={}, overrides=(), started_at=finished_at, finished_at=finished_at, nodes=nodes
    )


def spec(stored: Manifest, **changes: object) -> StageSpec:
    given = StageSpec(
        name=stored.name, stage=stored.stage, stage_version=1, key=stored.key, config={}, inputs=stored.parents,
        user_files={}, seed=3, libraries={},
    )  # fmt: skip
    return given.model_copy(update=changes)


def names(repository: ArtifactRepository) -> set[str]:
    """Of the artifacts that are whole."""
    return {m.name for m in repository.list_artifacts() if repository.manifest(m.ref) is not None}


def test_what_is_needed_stays_with_all_that_it_was_made_from_and_the_rest_goes(
    repository: ArtifactRepository, tmp_path: Path
) -> None:
    store = repository.store
    made: dict[str, Manifest] = {}

    def make(name: str, *parents: str, stage: str = "sft") -> ArtifactRef:
        refs = {parent: made[parent].ref for parent in parents}
        made[name] = published(repository, tmp_path / name, name, stage, refs)
        return made[name].ref

    make("data")
    make("base")
    move_alias(store, "bot", "best", make("old champion"), by="a", reason="")
    move_alias(store, "bot", "best", make("champion", "data", "base"), by="a", reason="")
    make("inputs of a job")
    make("half", "inputs of a job")
    store.delete(manifest_path(made["half"].ref))
    repository.write_spec(spec(made["half"]))
    rounds = Rounds(store, "loop")
    start = rounds.current().model_copy(update={"prompts": make("prompts"), "accepted": make("accepted")})
    rounds.start(start)
    rounds.end(
        RoundEnd(
            number=1,
            verdict="refused",
            reason="",
            record=make("record", "prompts"),
            candidate=make("candidate"),
            prompts=start.prompts,
            ended_at=LONG_AGO,
            run_id="r",
        )
    )
    write_record(store, record("lately", make("of a run"), finished_at=datetime.now(UTC)))
    write_record(store, record("once", make("of an old run"), finished_at=LONG_AGO))
    write_needs(store, "running", [make("reused by a running run")])
    make("of nobody", "data")
    store.put("someone/else.txt", b"theirs")
    store.put(f"{made['of nobody'].ref.path}/notes.txt", b"theirs")
    store.put(f"blobs/sha256/ab/{'c' * 64}", b"no blob is there")
    everything = set(made) - {"half"}

    lease = take_lease(store, lease_path(made["half"].ref))
    assert isinstance(lease, Lease)
    collection = GarbageCollection(store, NOTHING)
    before = store.list("")
    plan = collection.plan()
    assert store.list("") == before, "a plan only reads"
    assert {kind: amount.count for kind, amount in plan.going.items()} == {"policy": 2, "blobs": 1}  # 1: of `half`
    assert {group: amount.count for group, amount in plan.kept.items()} == {
        "alias": 2, "loop": 4, "run": 2, "job": 1, "lineage": 3,
    }  # fmt: skip
    assert collection.delete(plan).num_bytes == sum(amount.num_bytes for amount in plan.going.values())
    assert names(repository) == everything - {"of nobody", "of an old run"}
    remaining = set(store.list(""))
    assert {p for p in before if p not in remaining} == {
        *(manifest_path(made[name].ref) for name in ("of nobody", "of an old run")),
        *(blob_path(made[name].files[0].sha256) for name in ("of nobody", "of an old run", "half")),
    }

    lease.release()
    assert collected(store) == 3, "the spec of a stage that nobody computes, and its input"
    assert names(repository) == everything - {"of nobody", "of an old run", "inputs of a job"}
    assert collected(store) == 0


def test_what_the_history_of_a_model_and_its_decisions_refer_to_stays(
    local: ArtifactRepository, tmp_path: Path
) -> None:
    store = local.store
    made = {
        name: published(local, tmp_path / name, name).ref for name in ("first", "second", "third", "fourth", "rejected")
    }
    person = Evidence(approved_by="eve")
    move_alias(store, "bot", "champion", made["first"], by="a", reason="the first", evidence=person)
    for name in ("second", "rejected"):
        passed = gate(local, tmp_path / f"gate of {name}", made[name], made["first"], approval="required")
        propose(store, "bot", passed, by="run")
        if name == "second":
            approve(store, "bot", by="a", approved_by="eve", reason="read them")
    # No decision refers to this gate, the move alone.
    propose(store, "bot", gate(local, tmp_path / "gate of fourth", made["fourth"], made["second"]), by="run")
    promote(store, "bot", by="a", reason="better")
    store.delete("aliases/bot/candidate.json")  # and its history: the decision alone remains
    for path in store.list("registry/bot/moves/candidate/"):
        store.delete(path)
    move_alias(store, "bot", "champion", made["third"], by="a", reason="by hand", evidence=person)
    move_alias(store, "bot", "champion", made["third"], by="a", reason="again", evidence=person)
    assert names(local) == {*made, "gate of second", "gate of fourth", "gate of rejected"}
    assert collected(store) == 3, "two manifests and a blob: the gates share theirs"
    assert names(local) == {"first", "second", "third", "fourth", "gate of second", "gate of fourth"}


def test_a_rejected_candidate_stays_with_its_gate(local: ArtifactRepository, tmp_path: Path) -> None:
    first, rejected = (published(local, tmp_path / name, name).ref for name in ("first", "rejected"))
    propose(local.store, "bot", gate(local, tmp_path / "gate", rejected, first, approval="required"), by="run")
    reject(local.store, "bot", by="eve", reason="rude")
    local.store.delete("aliases/bot/candidate.json")
    assert collected(local.store) == 0
    local.store.put("registry/bot/decisions/" + "0" * 64 + ".json", b"{")
    with pytest.raises(IntegrityError, match=r"registry/bot/decisions/0{64}\.json cannot be read"):
        collected(local.store)


def test_times_to_live_are_by_kind_and_a_young_artifact_keeps_what_it_was_made_from(
    local: ArtifactRepository, tmp_path: Path
) -> None:
    now = datetime.now(UTC)

    def make(name: str, stage: str, kind: Kind, days: int, parents: dict[str, ArtifactRef] | None = None) -> Manifest:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "name.txt").write_text(name)
        finished = now - timedelta(days=days)
        return local.publish(manifest(name, stage, kind=kind, finished_at=finished, parents=parents or {}), folder)

    model = make("model", "sft", Kind.POLICY, 50)
    make("rollouts", "rl.rollouts", Kind.DATASET, 10, {"model": model.ref})
    make("step", "rl.policy", Kind.POLICY, 40)
    make("scores", "evaluation", Kind.EVALUATION, 40)
    make("fresh", "evaluation", Kind.EVALUATION, 20)
    assert collected(local.store, parse_keep([])) == 2  # the scores, with their blob
    assert names(local) == {"model", "rollouts", "step", "fresh"}
    assert collected(local.store, parse_keep(["rollouts=7d", "policies=6w", "evaluation=21d", "blobs=0m"])) == 4
    assert names(local) == {"step", "fresh"}


@pytest.mark.parametrize("text", ["rolouts=7d", "rollouts", "rollouts=7", "rollouts=-1d", "rollouts=7y", "=7d"])
def test_a_time_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match=f"^--keep {text}: "):
        parse_keep([text])


def test_times_are_said_as_they_are_given() -> None:
    keep = parse_keep(["rollouts=7d", "runs=2w", "blobs=90m", "policies=forever"])
    assert [described(keep[kind]) for kind in ("rollouts", "runs", "blobs", "policies")] == [
        "1w",
        "2w",
        "90m",
        "forever",
    ]


def test_checkpoints_go_when_their_stage_has_ended_or_was_given_up(local: ArtifactRepository, tmp_path: Path) -> None:
    store = local.store
    done, given_up = (published(local, tmp_path / name, name) for name in ("done", "given up"))
    write_record(store, record("failed", done.ref, given_up.ref, finished_at=datetime.now(UTC)))
    store.delete(manifest_path(given_up.ref))
    for ref in (done.ref, given_up.ref):
        name = Checkpoints.new_name(7)
        file = Checkpoints(store, ref).add(name, "state", b"state")
        Checkpoints(store, ref).commit(
            Checkpoint(name=name, step=7, ranks=1, files=(file,), libraries={}, created_at=LONG_AGO)
        )
        Attempts(store, ref).write(attempt("failed"))
        write_log(store, ref, "sft-0-1", "ValueError: no rows")
        store.put(uses_path(ref, LONG_AGO, "a"), b"{}")
    month = parse_keep(["blobs=0m"])
    assert collected(store, month) == 3  # the checkpoint of what is done, and the bytes of what is not
    assert Checkpoints(store, given_up.ref).newest_step() == 7
    assert [len(Attempts(store, ref).all()) for ref in (done.ref, given_up.ref)] == [1, 1]
    assert collected(store) == 5  # the attempt, too, its log, and what it used
    assert (names(local), store.list(f"{given_up.ref.path}/")) == ({"done"}, [])
    assert len(Attempts(store, done.ref).all()) == 1


class InterruptedStore(LocalStore):
    """Calls `before_write` before each deletion or conditional write; that may end the process's collection."""

    before_write: Callable[[str], None] = staticmethod(lambda path: None)

    def delete(self, path: str) -> None:
        self.before_write(path)
        super().delete(path)

    def replace(self, path: str, data: bytes, tag: str) -> None:
        self.before_write(path)
        super().replace(path, data, tag)


class KilledError(Exception):
    pass


def test_a_collection_killed_at_any_write_leaves_what_is_whole_and_the_next_one_ends_it(tmp_path: Path) -> None:
    def filled(folder: Path) -> tuple[InterruptedStore, ArtifactRepository]:
        store = InterruptedStore(folder / "store")
        repository = ArtifactRepository(store)
        base = published(repository, folder / "base", "base")
        parents = {"model": base.ref}
        kept = published(repository, folder / "kept", "kept", parents=parents)
        move_alias(store, "bot", "best", kept.ref, by="a", reason="")
        for name in ("one", "two"):
            repository.write_spec(spec(published(repository, folder / name, name, parents=parents)))
        return store, repository

    writes = 0
    while True:
        folder = tmp_path / str(writes)
        store, repository = filled(folder)
        left = writes

        def kill(path: str) -> None:
            nonlocal left
            if left == 0:
                raise KilledError
            left -= 1

        store.before_write = kill  # type: ignore[method-assign]
        try:
            collected(store)
            break
        except KilledError:
            pass
        store.before_write = lambda path: None  # type: ignore[method-assign]
        for ref in repository.refs():
            assert repository.manifest(ref) is not None, f"killed at write {writes}, a manifest has no blobs"
        assert {"base", "kept"} <= names(repository)
        LocalStore(folder / "store").delete(DELETING)  # what its time would do
        collected(store)
        assert names(repository) == {"base", "kept"}
        assert len(store.list("blobs/")) == 2
        writes += 1
    assert writes >= 6


def test_a_damaged_document_ends_the_collection_before_it_deletes(local: ArtifactRepository, tmp_path: Path) -> None:
    stored = published(local, tmp_path / "one", "one")
    damaged = published(local, tmp_path / "two", "two")
    local.store.put(manifest_path(damaged.ref), b"{")
    with pytest.raises(IntegrityError, match=r"cannot be read .* and nothing is deleted"):
        collected(local.store)
    local.store.put(manifest_path(damaged.ref), damaged.model_dump_json().encode())
    local.store.put("aliases/bot/champion.json", b'{"manifest": 3}')
    with pytest.raises(IntegrityError, match=r"aliases/bot/champion\.json cannot be read"):
        collected(local.store)
    assert names(local) == {stored.name, damaged.name}


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(30)
    assert not thread.is_alive()


def test_what_is_needed_between_the_plan_and_the_deletion_stays(repository: ArtifactRepository, tmp_path: Path) -> None:
    aliased, reused, base = (published(repository, tmp_path / name, name) for name in ("aliased", "reused", "base"))
    published(repository, tmp_path / "of nobody", "of nobody")
    shared = hashlib.sha256(b"shared").hexdigest()
    repository.put_blob(b"shared")
    collection = GarbageCollection(repository.store, NOTHING)
    plan = collection.plan()
    move_alias(repository.store, "bot", "best", aliased.ref, by="a", reason="")
    write_needs(repository.store, "run", [reused.ref])
    folder = tmp_path / "published meanwhile"
    folder.mkdir()
    (folder / "shared.txt").write_text("shared")
    made = repository.upload(manifest("new", parents={"model": base.ref}), folder)
    assert collection.delete(plan).count == 2 + 2  # of nobody's and base's: only a run's record, or job, needs base
    assert repository.store.exists(blob_path(shared)), "a job that has not committed yet counts on it"
    repository.commit(made)
    assert names(repository) == {"aliased", "reused", "new"}
    assert repository.store.list("uploads/") == []


def test_who_needs_what_is_being_deleted_waits_until_it_is_over(local: ArtifactRepository, tmp_path: Path) -> None:
    stored = published(local, tmp_path / "one", "one")
    store = local.store
    path = blob_path(stored.files[0].sha256)
    said: list[str] = []
    with Deletions(store) as deletions:
        deletions.announce([path, stored.ref.path])
        with pytest.raises(StoreError, match="another `alignment gc` is deleting"):
            Deletions(store).announce(["x"])
        fence.wait_for_deletions(store, ["another"], said.append)
        assert said == []
        with in_thread(lambda: fence.wait_for_deletions(store, [path], said.append)) as waiting:
            time.sleep(0.2)
            assert waiting.is_alive()
            deletions.announce(["another"])
    [sentence] = said
    assert sentence.startswith("waiting for `alignment gc`, which deletes something needed here (until ")
    Deletions(store).announce(["x"])


@pytest.mark.parametrize("needs", ["the bytes", "the artifact"])
def test_a_need_that_comes_up_during_the_deletion_waits_and_finds_nothing_half(tmp_path: Path, needs: str) -> None:
    store = InterruptedStore(tmp_path / "store")
    repository = ArtifactRepository(store)
    old = published(repository, tmp_path / "old", "old")
    again = tmp_path / "again"
    again.mkdir()
    (again / "name.txt").write_text("old")
    found: list[Manifest | None] = []

    def publish() -> None:
        new = repository.publish(manifest("new"), again)
        found.append(repository.manifest(new.ref))

    def reuse() -> None:
        write_needs(store, "run", [old.ref])
        found.append(repository.manifest(old.ref))

    thread = threading.Thread(target=publish if needs == "the bytes" else reuse)
    path = blob_path(old.files[0].sha256) if needs == "the bytes" else manifest_path(old.ref)

    def begin(deleted: str) -> None:
        if deleted == path and not thread.is_alive():
            thread.start()
            thread.join(0.5)
            assert found == [], "it does not look before the deletion is over"

    store.before_write = begin  # type: ignore[method-assign]
    collected(store)
    thread.join(30)
    assert [None if one is None else one.name for one in found] == (["new"] if needs == "the bytes" else [None])


class ReadStore(LocalStore):
    """Calls `around_read` before and after each reading request."""

    around_read: Callable[[], None] = staticmethod(lambda: None)

    def get_tagged(self, path: str) -> tuple[bytes, str] | None:
        self.around_read()
        return super().get_tagged(path)

    def entries(self, prefix: str) -> Entries:
        self.around_read()
        entries = super().entries(prefix)
        self.around_read()
        return entries


def test_an_upload_that_is_committed_at_any_read_of_a_collection_is_whole(tmp_path: Path) -> None:
    moment = 0
    while commit_beside_a_collection(tmp_path / str(moment), moment):
        moment += 1
    assert moment >= 10


def commit_beside_a_collection(folder: Path, moment: int) -> bool:
    """Commit an upload at a read of a collection. Return False if there were fewer reads."""
    store, reads = ReadStore(folder / "store"), 0
    repository = ArtifactRepository(store)
    repository.put_blob(b"garbage")
    (folder / "new").mkdir()
    (folder / "new" / "name.txt").write_text("garbage")  # the bytes that the plan deletes
    plan = GarbageCollection(store, NOTHING).plan()
    made = repository.upload(manifest("new"), folder / "new")
    write_needs(store, "run", [made.ref])

    def commit() -> None:
        nonlocal reads
        if reads == moment:
            ArtifactRepository(LocalStore(folder / "store")).commit(made)
        reads += 1

    store.around_read = commit  # type: ignore[method-assign]
    GarbageCollection(store, NOTHING).delete(plan)
    committed = reads > moment
    store.around_read = lambda: None  # type: ignore[method-assign]
    assert names(repository) == ({"new"} if committed else set()), f"committed at read {moment}"
    return committed


def test_no_deletion_starts_late(local: ArtifactRepository) -> None:
    """One that was held up while its announcement ran out could take what others rely on by then."""
    deletions = Deletions(local.store, timedelta(seconds=3))
    deletions.announce(["x"])
    assert deletions.may_delete()
    time.sleep(1.1)
    assert not deletions.may_delete()


def test_a_publisher_beside_collections_loses_nothing(store_url: str, tmp_path: Path) -> None:
    publish_beside_collections(store_url, tmp_path, rounds=2)


def publish_beside_collections(store_url: str, folder: Path, rounds: int) -> None:
    """Publishes artifacts that share files with garbage while collections run; each must be whole when it is there."""
    store = open_store(store_url)
    repository = ArtifactRepository(store)
    collecting, errors = threading.Event(), []
    collecting.set()

    def collect() -> None:
        try:
            while collecting.is_set():
                collected(open_store(store_url))
        except Exception as error:  # reported by the test
            errors.append(error)

    with in_thread(collect):
        try:
            for number in range(rounds):
                made = []
                for name in ("a", "b"):
                    source = folder / f"{number}-{name}"
                    source.mkdir()
                    (source / "shared.txt").write_text(f"shared of {number % 2}")  # garbage of the round before last
                    (source / "own.txt").write_text(f"{number} {name}")
                    made.append((manifest(f"{number} {name}"), source))
                write_needs(store, "run", [one.ref for one, _ in made])
                for one, source in made:
                    repository.publish(one, source)
                for one, _ in made:
                    assert repository.manifest(one.ref) is not None, f"{one.name} is not whole"
        finally:
            collecting.clear()
    assert errors == []
    assert names(repository) >= {f"{rounds - 1} {name}" for name in ("a", "b")}
    collected(store)
    assert names(repository) == {f"{rounds - 1} {name}" for name in ("a", "b")}
