"""Concurrent episodes, none of which waits for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rlhf_core.episodes.rounds import Play
from rlhf_core.episodes.stream import Stream
from rlhf_core.rollout.engines import Engines

T = TypeVar("T")


def play_concurrently(episodes: Sequence[Play[T]], engines: Engines) -> list[T]:
    """Play the episodes; return their results, in order. The first error of an episode or an engine is raised.

    After an error the engines may have unfinished requests, and must not be used again.
    """
    with Stream(engines) as stream:
        return stream.play(episodes)
