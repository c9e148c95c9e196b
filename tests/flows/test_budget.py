"""A run with a budget on real Ray and Prefect: it stops at a checkpoint, and a larger budget goes on from there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.schemas.objects import State

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.store import Store
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.pipeline.run_costs import run_costs
from tests.flows.conftest import NODES, Workplace
from tests.flows.few import few

pytestmark = [
    pytest.mark.endurance("chaos"),
    pytest.mark.parametrize("store_url", ["local"], indirect=True),
]
LONG = ["pretrain.epochs=10000", "prices={currency: EUR, core: 3600}"]  # a second of a core costs 1
DAY = timedelta(days=1)


@pytest.mark.slow("two jobs that train")
def test_a_run_stops_over_its_budget_and_a_larger_one_resumes(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_STOP_SECONDS", "60")
    few(workplace.recipe, NODES)
    ref, store = prepare(workplace.recipe, LONG).graph["pretrain"].ref, workplace.repository.store
    with _another_day_of_a_core_once_checkpointed(store, ref, after=0):
        first = _run(workplace, DAY.total_seconds())
    assert (first.name, first.is_cancelled()) == ("OverBudget", True)
    assert "of its budget of 86,400.00 EUR: its jobs were stopped" in (first.message or "")
    step = Checkpoints(store, ref).newest_step()
    assert step is not None
    with _another_day_of_a_core_once_checkpointed(store, ref, after=step):
        assert _run(workplace, 2 * DAY.total_seconds()).name == "OverBudget"
    one, other = (attempt for attempt in Attempts(store, ref).all() if attempt.host != "elsewhere")
    assert (one.outcome, one.resumed_after, one.step) == ("stopped", None, step)
    assert (other.outcome, other.resumed_after) == ("stopped", step)
    (cost,) = run_costs(workplace.repository, other.run_id).stages
    assert cost.outcome == "failed"
    assert cost.own.money == pytest.approx(other.seconds)
    assert cost.others.money == pytest.approx(one.seconds + 2 * DAY.total_seconds())


def _run(workplace: Workplace, budget: float) -> State[object]:
    return few(workplace.recipe, ["pretrain"], LONG, budget, return_state=True)  # type: ignore[call-overload,no-any-return]


@contextmanager
def _another_day_of_a_core_once_checkpointed(store: Store, ref: ArtifactRef, after: int) -> Iterator[None]:
    """Store an attempt of a job elsewhere, which was killed, once a checkpoint is newer than `after`."""

    def store_attempt() -> None:
        deadline = time.monotonic() + 300
        while (Checkpoints(store, ref).newest_step() or 0) <= after:
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.2)
        now = datetime.now(UTC)
        Attempts(store, ref).write(
            Attempt(
                id=f"other{after}", host="elsewhere", device="cpu", gpus=0.0, cores=1.0, started_at=now - DAY,
                seen_at=now, outcome="killed",
            )
        )  # fmt: skip

    with ThreadPoolExecutor(1) as pool:
        stored = pool.submit(store_attempt)
        yield
        stored.result()
