"""A run whose flow and whose rank are killed ends with the weights of a run without kills: `test_chaos.py` in brief."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prefect.client.orchestration import SyncPrefectClient

from tests.chaos.killed_run import require_undisturbed_end
from tests.chaos.kills import KILLS
from tests.chaos.scenario import Place

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow("starts the local stack and runs a recipe to its SFT twice"),
    pytest.mark.timeout(1200),
]


def test_a_run_whose_flow_and_rank_are_killed_ends_as_if_they_had_not_been(
    place: Place, client: SyncPrefectClient
) -> None:
    brief = replace(place, recipe_name="brief")
    require_undisturbed_end(brief, client, {name: KILLS[name] for name in ("flow", "rank")})
