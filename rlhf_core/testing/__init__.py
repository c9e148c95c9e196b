"""Contracts of the parts of a run, as classes of pytest tests to subclass. Needs pytest."""

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{part}"
        for part in ("engine", "environment", "reward", "runtime", "stage", "store", "training_engine")
    )
)
