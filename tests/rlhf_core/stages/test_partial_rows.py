"""What a stage that trains nothing keeps, when, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.config.stages.checkpoint import PartialResultsConfig
from rlhf_core.errors import PreemptedError, RewardError, StoppedError, StoreError
from rlhf_core.stages.partial_rows import PartialRows
from rlhf_core.system.stopping import STOPS, Stop
from tests.rlhf_core.stages.context import LocalContext

SELDOM = PartialResultsConfig(every_minutes=60)
AT_ONCE = PartialResultsConfig(every_minutes=1e-9)


@pytest.fixture(autouse=True)
def no_stop() -> Iterator[None]:
    yield
    STOPS.clear()


def attempt(
    context: LocalContext, config: PartialResultsConfig, before: Callable[[int], None] = lambda part: None
) -> tuple[list[list[int]], list[int]]:
    """Four parts of two rows. Return all rows, and the parts that were computed. before: called with their numbers."""
    computed: list[int] = []

    def compute(part: int) -> list[int]:
        before(part)
        computed.append(part)
        return [part, part * 10]

    with PartialRows(config, context) as kept:
        rows = [kept.rows(f"rows-{part}", lambda part=part: compute(part)) for part in range(4)]  # type: ignore[misc]
    return rows, computed


ROWS = [[part, part * 10] for part in range(4)]


def interrupted(context: LocalContext, config: PartialResultsConfig, error: BaseException, part: int = 2) -> None:
    def before(number: int) -> None:
        if number == part:
            raise error

    with pytest.raises(type(error)):
        attempt(context, config, before)


@pytest.mark.parametrize("error", [RewardError("the judge is gone"), KeyboardInterrupt(), SystemExit(15)])
def test_an_error_or_an_interruption_stores_what_is_complete(tmp_path: Path, error: BaseException) -> None:
    context = LocalContext(tmp_path)
    interrupted(context, SELDOM, error)
    assert context.checkpoints.newest_step() == 4
    assert attempt(context, SELDOM) == (ROWS, [2, 3])
    assert context.progresses == [(0, 0, "resumes from 4 kept rows", {})]


def test_a_kill_costs_what_was_computed_since_the_last_checkpoint(tmp_path: Path) -> None:
    class Kill(BaseException):
        pass

    often, seldom = LocalContext(tmp_path / "often"), LocalContext(tmp_path / "seldom")
    interrupted(often, AT_ONCE, Kill())
    interrupted(seldom, SELDOM, Kill())
    assert attempt(often, AT_ONCE) == (ROWS, [2, 3])
    assert attempt(seldom, SELDOM) == (ROWS, [0, 1, 2, 3])


def test_much_is_stored_before_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.stages.partial_rows._MOST_BYTES", 1)
    context = LocalContext(tmp_path)
    attempt(context, SELDOM)
    assert [each.step for each in context.checkpoints.newest()] == [8, 6, 4, 2]  # type: ignore[union-attr]


def test_a_part_that_is_damaged_is_computed_again_and_no_other(tmp_path: Path) -> None:
    context = LocalContext(tmp_path)
    attempt(context, AT_ONCE)
    (part,) = (path for path in (tmp_path / "store").rglob("rows-1"))
    part.chmod(0o600)
    part.write_bytes(b"[1, 11]")
    assert attempt(context, AT_ONCE) == (ROWS, [1])
    assert attempt(context, AT_ONCE) == (ROWS, [])  # the newer one is read


def test_what_was_stored_by_halves_is_computed_again(tmp_path: Path) -> None:
    context = LocalContext(tmp_path)
    attempt(context, AT_ONCE)
    manifests = sorted((tmp_path / "store").rglob("manifest.json"))
    manifests[2].unlink()
    assert attempt(context, AT_ONCE) == (ROWS, [2])


@pytest.mark.parametrize("error", [StoppedError, PreemptedError])
def test_a_requested_stop_is_obeyed_behind_a_part(tmp_path: Path, error: type[StoppedError]) -> None:
    def before(part: int) -> None:
        if part == 1:
            STOPS.request(Stop("a node is taken away", error), seconds=60)

    context = LocalContext(tmp_path)
    with pytest.raises(error, match="a node is taken away; it resumes from 4 kept rows, which are stored"):
        attempt(context, SELDOM, before)
    STOPS.clear()
    assert attempt(context, SELDOM) == (ROWS, [2, 3])


def test_a_job_that_lost_its_lease_stores_nothing(tmp_path: Path) -> None:
    context = LocalContext(tmp_path)
    STOPS.superseded = True
    interrupted(context, SELDOM, KeyboardInterrupt())
    assert context.checkpoints.newest_step() is None


def test_the_error_of_the_stage_is_reported_where_the_store_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the store is gone")

    monkeypatch.setattr(Checkpoints, "commit", fail)
    interrupted(LocalContext(tmp_path), SELDOM, RewardError("the judge is gone"))
    assert "the complete rows could not be stored: the store is gone" in capsys.readouterr().out


def test_settings_that_keep_nothing(tmp_path: Path) -> None:
    context = LocalContext(tmp_path)
    interrupted(context, PartialResultsConfig(every_minutes=None), RewardError("the judge is gone"))
    assert context.checkpoints.newest_step() is None
    interrupted(context, SELDOM, RewardError("the judge is gone"))
    again = PartialResultsConfig(resume=False, every_minutes=60)
    assert attempt(context, again) == (ROWS, [0, 1, 2, 3])
