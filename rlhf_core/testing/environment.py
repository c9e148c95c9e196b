"""The contract of an environment: episodes are reproducible and independent, and leave no processes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import psutil
import pytest

from rlhf_core.environments import Environment, EnvironmentHost, Feedback, Reply
from rlhf_core.errors import EpisodeError


class EnvironmentContract:
    """Subclass it with `make`, a `row`, and the `replies` of two episodes from that row."""

    row: Mapping[str, Any]
    replies: tuple[Sequence[str], Sequence[str]]
    failing_reply: str | None = None  # one that must be an EpisodeError, if there is any

    def make(self) -> EnvironmentHost:
        raise NotImplementedError

    @pytest.fixture
    def environments(self) -> Iterator[EnvironmentHost]:
        with closing(self.make()) as environments:
            yield environments

    def new(self, environments: EnvironmentHost) -> Environment:
        return cast(Environment, environments.of_row(self.row).new())

    def play(self, environments: EnvironmentHost, *episodes: Sequence[str], seed: int = 0) -> list[list[Any]]:
        """Return all messages of each episode; episodes take turns."""

        async def play() -> list[list[Any]]:
            opened = [self.new(environments) for _ in episodes]
            messages = [[await episode.reset(self.row, seed)] for episode in opened]
            for turn in range(max(map(len, episodes))):
                for episode, replies, answers in zip(opened, episodes, messages, strict=True):
                    if turn < len(replies):
                        answers.append(await episode.step(Reply(replies[turn], replies[turn])))
            for episode, answers in zip(opened, messages, strict=True):
                answers.append(await episode.finish())
                episode.close()
                episode.close()
            return messages

        return asyncio.run(play())

    def test_an_episode_asks_and_answers(self, environments: EnvironmentHost) -> None:
        assert environments.name
        assert environments.max_turns >= max(map(len, self.replies))
        ((first, *answers, final),) = self.play(environments, self.replies[0])
        _require_messages(first.messages if isinstance(first, Feedback) else first)
        for answer in answers:
            assert isinstance(answer, Feedback)
            assert math.isfinite(answer.reward)
            assert all(math.isfinite(value) for value in answer.metrics.values())
            if not answer.done:
                _require_messages(answer.messages)
        assert math.isfinite(final)
        assert not any(answer.done for answer in answers[:-1]), "no reply is read behind the end of an episode"

    def test_a_seed_repeats_an_episode(self, environments: EnvironmentHost) -> None:
        assert self.play(environments, self.replies[0], seed=5) == self.play(environments, self.replies[0], seed=5)

    def test_episodes_side_by_side_are_as_alone(self, environments: EnvironmentHost) -> None:
        alone = [self.play(environments, replies)[0] for replies in self.replies]
        assert alone[0] != alone[1], "give replies that are answered in two ways"
        assert self.play(environments, *self.replies) == alone

    def test_an_episode_that_fails_touches_no_other(self, environments: EnvironmentHost) -> None:
        expected = self.play(environments, self.replies[0])
        if self.failing_reply is not None:
            with pytest.raises(EpisodeError):
                self.play(environments, [self.failing_reply])
        assert self.play(environments, self.replies[0]) == expected

    def test_no_process_is_left_when_they_are_closed(self) -> None:
        """Holds also for an episode that has not ended."""
        before = set(psutil.Process().children(recursive=True))
        environments = self.make()
        self.play(environments, self.replies[0])
        asyncio.run(_begin(self.new(environments), self.row))
        environments.close()
        psutil.wait_procs(left := set(psutil.Process().children(recursive=True)) - before, timeout=5)
        assert {process for process in left if process.is_running()} == set()


async def _begin(episode: Environment, row: Mapping[str, Any]) -> None:
    await episode.reset(row, 0)
    episode.close()


def _require_messages(messages: Any) -> None:
    assert messages, "the policy is asked for a reply to at least one message"
    for message in messages:
        assert isinstance(message["role"], str)
        assert isinstance(message["content"], str | list)
