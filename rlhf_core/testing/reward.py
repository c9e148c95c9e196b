"""The contract of a reward of text: a finite number for each completion or a RewardError, and no processes left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rewards import Reward, RewardResult

Sample = tuple[str, str, Mapping[str, Any]]  # completion, prompt, row


class RewardContract:
    """Subclass it with `make` and `samples`: at least two whose rewards differ."""

    samples: Sequence[Sample]
    unusable: Sample | None = None  # one that must be an error, if there is any

    def make(self) -> Reward:
        raise NotImplementedError

    @pytest.fixture
    def reward(self) -> Iterator[Reward]:
        reward = self.make()
        yield reward
        reward.close()

    def test_a_finite_reward_for_each_completion(self, reward: Reward) -> None:
        result = _of(reward, self.samples)
        count = len(self.samples)
        assert len(result.rewards) == len(result.scores) == count
        assert all(math.isfinite(total) for total in result.totals())
        assert all(score is None or 0 <= score <= 1 for score in result.scores)
        assert all(len(values) == count for values in result.extra.values())
        assert result.steps is None or len(result.steps) == count
        assert result.failures == {}
        assert len(set(result.totals())) > 1, "give samples whose rewards differ"

    def test_a_reward_belongs_to_its_completion_in_any_order(self, reward: Reward) -> None:
        first, reversed_ = _of(reward, self.samples), _of(reward, self.samples[::-1])
        assert reversed_.totals() == pytest.approx(first.totals()[::-1])
        assert reversed_.scores == first.scores[::-1]

    def test_the_same_completions_have_the_same_rewards(self, reward: Reward) -> None:
        first = _of(reward, self.samples)
        again = _of(reward, self.samples)
        assert (again.rewards, again.scores, again.steps) == (first.rewards, first.scores, first.steps)

    def test_what_cannot_be_judged_is_an_error_and_no_reward(self, reward: Reward) -> None:
        if self.unusable is not None:
            with pytest.raises(RewardError):
                _of(reward, [self.samples[0], self.unusable])
        assert _of(reward, self.samples[:1]).rewards, "it judges on after an error"

    def test_no_process_is_left_when_it_is_closed(self) -> None:
        before = _processes()
        reward = self.make()
        _of(reward, self.samples)
        reward.close()
        psutil.wait_procs(left := _processes() - before, timeout=5)
        assert {process for process in left if process.is_running()} == set()


def _of(reward: Reward, samples: Sequence[Sample]) -> RewardResult:
    completions, prompts, rows = zip(*samples, strict=True)
    return reward(list(completions), list(prompts), list(rows))


def _processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
