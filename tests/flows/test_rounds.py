"""What the deployments of loops are given in Prefect's UI, where no command has looked at it before."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prefect.exceptions import ParameterTypeError
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from flows.iterative_dpo import iterative_dpo
from flows.rounds import run_rounds
from rlhf_core.artifacts.attempt import Attempt
from rlhf_core.artifacts.attempts import Attempts
from rlhf_core.artifacts.local_store import LocalStore
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.rounds import Rounds
from rlhf_core.errors import RecipeError

pytestmark = pytest.mark.system

SFT = ArtifactRef(stage="sft", key="1" * 64)


def test_a_recipe_without_a_loop() -> None:
    with pytest.raises(RecipeError, match=r"tiny.* has no `loop`"):
        run_rounds("tiny", [], 1)


def test_a_round_that_would_pass_the_loops_budget_is_not_started(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core for an hour at 3.60 was spent in a round that was given up."""
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ALIGNMENT_WEBHOOK", "http://127.0.0.1:1")
    store = LocalStore(tmp_path / "store")
    rounds, began = Rounds(store, "tiny-loop"), datetime.now(UTC)
    rounds.start(rounds.current("r").model_copy(update={"nodes": (SFT,), "started_at": began}))
    Attempts(store, SFT).write(
        Attempt(
            id="a", host="h", device="cpu", gpus=0.0, cores=1.0, started_at=began, seen_at=began + timedelta(hours=1),
            outcome="failed",
        )
    )  # fmt: skip
    rounds.skip("it failed")
    parameters = {"recipe": "tiny-loop", "overrides": ["prices={currency: EUR, core: 3.6}"], "budget": 3.5}
    with temporary_settings({PREFECT_API_URL: prefect_api, PREFECT_HOME: tmp_path}):
        state = iterative_dpo(**parameters, return_state=True)
    assert (state.name, state.is_cancelled()) == ("OverBudget", True)
    assert (state.message or "").startswith(
        "round 2 was not started: the loop has cost 3.60 EUR of its budget of 3.50 EUR (estimated cost: unknown"
    )
    assert rounds.count() == 1
    (sent,) = (path for path in store.list("runs/") if "/notified/" in path)
    assert "/notified/over_budget-" in sent
    assert json.loads(store.get(sent) or b"")["text"] == state.message


@pytest.mark.parametrize("rounds", [0, -2])
def test_no_rounds_at_all(rounds: int) -> None:
    with pytest.raises(ParameterTypeError, match="greater than or equal to 1"):
        iterative_dpo.validate_parameters({"rounds": rounds})
