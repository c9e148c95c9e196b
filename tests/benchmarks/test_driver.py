"""A step of every kind of advantage is measured, and its memory grows with its tokens alone."""

from __future__ import annotations

import sys

import pytest

from benchmarks.driver import PHASES, Case, in_own_process

pytestmark = [pytest.mark.endurance("benchmarks"), pytest.mark.slow("millions of tokens")]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_memory_grows_with_tokens_whatever_the_lengths(algorithm: str) -> None:
    small, large, uneven = (
        in_own_process(Case(algorithm, trajectories, 1000, longest))
        for trajectories, longest in ((256, 0), (1024, 0), (1024, 64_000))
    )
    assert tuple(large.seconds) == PHASES
    assert large.tokens > 3.9 * small.tokens
    assert large.sent / large.tokens == pytest.approx(small.sent / small.tokens, rel=0.1)
    assert large.peak / large.tokens < 1.5 * small.peak / small.tokens
    assert uneven.peak / uneven.tokens < 1.5 * large.peak / large.tokens  # no table of sequences x the longest
