"""Both forms compute the same, and a peak is what a pass adds."""

from __future__ import annotations

import sys

import pytest

from benchmarks.logprobs import Case, in_own_process

pytestmark = pytest.mark.endurance("benchmarks")

CASES = [Case(3000, 10_000, 8, "float32", "train", form, repeats=1) for form in ("plain", "chunked")]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_chunks_save_memory_and_compute_the_same() -> None:
    plain, chunked = (in_own_process(case) for case in CASES)
    assert chunked.mean == pytest.approx(plain.mean, rel=1e-6)
    assert plain.peak > 2 * 3000 * 10_000 * 4  # the logits, and their gradient at least
    assert chunked.peak < plain.peak
    assert plain.seconds > 0
