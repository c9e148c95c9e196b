"""A run whose flow and whose rank are killed ends with the weights of a run without kills: `test_chaos.py` in brief."""

from __future__ import annotations

import pytest
from prefect.client.orchestration import SyncPrefectClient

from tests.chaos.killed_run import require_undisturbed_end
from tests.chaos.kills import KILLS
from tests.chaos.scenario import Place

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow("starts the local stack and runs a recipe twice"),
    pytest.mark.timeout(1200),
]


def test_a_run_whose_flow_and_rank_are_killed_ends_as_if_they_had_not_been(
    place: Place, client: SyncPrefectClient
) -> None:
    require_undisturbed_end(place, client, {name: KILLS[name] for name in ("flow", "rank")})
