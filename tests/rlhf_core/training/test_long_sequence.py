"""A sequence that one rank cannot hold under a limit of memory trains on four. Their side is long_sequence.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rlhf_core.training.long_sequence import long_model
from tests.rlhf_core.training.ranks import run_ranks

pytestmark = [pytest.mark.endurance("rl-matrix"), pytest.mark.timeout(900)]
MEBIBYTES = 384


@pytest.mark.slow("steps on a sequence of 4,096 tokens, one of them on four ranks")
def test_four_ranks_train_what_is_too_long_for_one(tmp_path: Path) -> None:
    long_model(tmp_path / "long")

    def step(ranks: int, mebibytes: int) -> list[dict[str, float | str]]:
        answers, _ = run_ranks("tests.rlhf_core.training.long_sequence", ranks, tmp_path, str(ranks), str(mebibytes))
        return [numbers["step"] for numbers in answers]

    (whole,) = step(1, 0)
    (alone,) = step(1, MEBIBYTES)
    assert "memory" in str(alone["error"])
    assert step(4, MEBIBYTES) == [{"norm": pytest.approx(whole["norm"], rel=1e-4)}] * 4
