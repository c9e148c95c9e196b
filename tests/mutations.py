"""How many mutated recipes, rows and model folders the tests send to `plan`: ALIGNMENT_EXAMPLES, else a few."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

_GIVEN = os.environ.get("ALIGNMENT_EXAMPLES")


def examples(few: int) -> settings:
    """The same ones each time; others each time where ALIGNMENT_EXAMPLES says how many."""
    return settings(
        max_examples=int(_GIVEN or few),
        deadline=None,
        derandomize=not _GIVEN,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        print_blob=True,
    )


PATIENCE = pytest.mark.timeout(600 + 2 * int(_GIVEN or 0))  # seconds
