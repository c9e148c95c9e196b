"""A recipe on a real Slurm of two nodes; skipped, with the reason, where there cannot be one."""

from __future__ import annotations

import pytest

from tests.slurm.__main__ import SCENARIO
from tests.slurm.daemons import obstacle
from tests.slurm.scenario import STEPS
from tests.two_nodes.machines import in_a_rack

_OBSTACLE = obstacle()
pytestmark = [
    pytest.mark.endurance("two-nodes"),
    pytest.mark.skipif(bool(_OBSTACLE), reason=f"there is no Slurm of two nodes here: {_OBSTACLE}"),
]


@pytest.mark.timeout(3000)  # three starts of a Ray cluster, a Prefect server and two ranks
def test_a_job_at_its_time_limit_is_queued_again_and_resumes_to_the_bit() -> None:
    found = in_a_rack(SCENARIO)
    assert found["restarts"] == [1, 0]
    assert 0 < found["checkpoint"] < STEPS  # none was due
    assert found["weights"][0] == found["weights"][1]
    assert found["metrics"][0] == found["metrics"][1]
