"""Rounds of a loop: sample, score, pair, train, evaluate, and keep the candidate if it is not worse. By hand, or on a
schedule.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from flows.notifications import notify_failure
from flows.parameters import Budget, Overrides, RecipeName, RoundCount
from flows.rounds import run_rounds
from flows.running import Row, stop_jobs


@flow(name="iterative-dpo", on_cancellation=[stop_jobs], on_failure=[notify_failure], on_crashed=[notify_failure])
def iterative_dpo(
    recipe: RecipeName = "tiny-loop",
    overrides: Overrides = [],  # noqa: B006  Prefect copies it
    rounds: RoundCount = 1,
    budget: Budget = None,
) -> list[Row] | State[Any]:
    """Finish the round that was started and has not ended, or run the next one; `rounds` of them.

    Returns one row per round: the verdict on its candidate, and the reason. While another run of the loop is at work,
    none is run, and the state is Skipped.

    Args:
        recipe: name of a shipped recipe, or path of a .yaml file, with a `loop`
        overrides: settings to change, each key.key=value, such as dpo.max_steps=200
        rounds: number of rounds
        budget: money that all rounds of the loop together may cost, in the currency of `prices`; a round that is
            expected to pass it is not started
    """
    return run_rounds(recipe, overrides, rounds, budget)
