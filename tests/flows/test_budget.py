"""A run with a budget on real Ray and Prefect: it stops at a checkpoint, and a larger budget goes on from there."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import State

from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.checkpoints import Checkpoints
from rlhf_core.graph.graph import Node
from rlhf_core.pipeline.prepare import prepare
from rlhf_core.pipeline.run_costs import run_costs
from tests.flows.conftest import NODES, Workplace
from tests.flows.few import few

pytestmark = [
    pytest.mark.endurance("chaos"),
    pytest.mark.parametrize("store_url", ["local"], indirect=True),
]
LONG = ["pretrain.epochs=10000", "prices={currency: EUR, core: 3600}"]  # a second of a core costs 1


@pytest.mark.slow("waits for two heartbeats of real jobs")
def test_a_run_stops_over_its_budget_and_a_larger_one_resumes(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNMENT_STOP_SECONDS", "60")
    few(workplace.recipe, NODES)
    node = prepare(workplace.recipe, LONG).graph["pretrain"]
    first = _run(workplace, 3.0)
    assert (first.name, first.is_cancelled()) == ("OverBudget", True)
    assert "of its budget of 3.00 EUR: its jobs were stopped" in (first.message or "")
    step = Checkpoints(workplace.repository.store, node.ref).newest_step()
    assert step is not None
    spent = sum(attempt.seconds for attempt in _attempts(workplace, node))
    assert _run(workplace, spent + 3.0).name == "OverBudget"
    one, other = _attempts(workplace, node)
    assert (one.outcome, one.resumed_after, other.outcome, other.resumed_after) == ("stopped", None, "stopped", step)
    (cost,) = run_costs(workplace.repository, other.run_id).stages
    assert cost.outcome == "failed"
    assert cost.own.money == pytest.approx(other.seconds)
    assert cost.others.money == pytest.approx(one.seconds)


def _run(workplace: Workplace, budget: float) -> State[object]:
    return few(workplace.recipe, ["pretrain"], LONG, budget, return_state=True)  # type: ignore[call-overload,no-any-return]


def _attempts(workplace: Workplace, node: Node) -> list[Attempt]:
    return Attempts(workplace.repository.store, node.ref).all()
