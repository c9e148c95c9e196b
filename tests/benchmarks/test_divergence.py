"""Both forms compute the same, and chunks need less memory."""

from __future__ import annotations

import sys

import pytest

from benchmarks.divergence import Case, in_own_process

pytestmark = [pytest.mark.endurance("benchmarks"), pytest.mark.slow("measured in processes of their own")]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_chunks_save_memory_and_compute_the_same() -> None:
    whole, chunked = (
        in_own_process(Case(3000, 10_000, 8, 16, "float32", "jensen_shannon", form, repeats=1))
        for form in ("whole", "chunked")
    )
    assert chunked.mean == pytest.approx(whole.mean, rel=1e-4)
    assert whole.peak > 4 * 3000 * 10_000 * 4  # both distributions, the mixture and a gradient at least
    assert chunked.peak < whole.peak
