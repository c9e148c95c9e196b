"""The example learns: its pure parts are usable without ranks and engines."""

from __future__ import annotations

from statistics import fmean

import pytest

from examples.grpo import train

pytestmark = pytest.mark.parts


def test_the_mean_reward_rises(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = train(seed=0)
    assert len(rewards) == 100
    assert fmean(rewards[:5]) < 0.3
    assert fmean(rewards[-10:]) > 0.95
    assert capsys.readouterr().out.count("mean reward") == 6
