"""Episodes side by side: whatever takes how long, the engines are asked the same in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rlhf_core.episodes.rounds import Ask, Play, play_in_rounds
from rlhf_core.rollout.engine import Request, SamplingParameters
from rlhf_core.rollout.inline import InlineEngines
from rlhf_core.rollout.scripted import ScriptedEngine
from rlhf_core.types import Completion

GREEDY = SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=4, stop_token_ids=())


class Counts(ScriptedEngine):
    """Completes a prompt with its length; writes down the prompts of each call, and whether prefixes were kept."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, seed: [])
        self.calls: list[list[Sequence[int]]] = []
        self.kept: list[bool] = []
        self.forgotten = 0

    def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
        self.calls.append([request.prompt for request in requests])
        self.kept.append(keep_prefixes)
        return [Completion((len(request.prompt),), (0.0,), "stop", 0) for request in requests]

    def forget(self) -> None:
        self.forgotten += 1


def episode(number: int, turns: int, pauses: Sequence[float] = ()) -> Play[list[int]]:
    """Asks `turns` times, each time with all that it was answered; before it asks it may take its time."""

    async def play(ask: Ask) -> list[int]:
        tokens = [number]
        for turn in range(turns):
            await asyncio.sleep(pauses[turn] if pauses else 0.0)
            tokens += (await ask(Request(tuple(tokens), GREEDY, None))).token_ids
        return tokens

    return play


def test_every_round_asks_for_all_that_go_on_in_their_order() -> None:
    engines = Counts()
    made = play_in_rounds([episode(70, 2), episode(80, 0), episode(90, 3), episode(60, 1)], InlineEngines(engines))
    assert made == [[70, 1, 2], [80], [90, 1, 2, 3], [60, 1]]
    assert engines.calls == [[(70,), (90,), (60,)], [(70, 1), (90, 1)], [(90, 1, 2)]]
    assert engines.kept == [False, True, True]  # what the first round forgets is what another play has left
    assert engines.forgotten == 1, "after the last round no request continues what was computed"


def test_calls_do_not_depend_on_how_long_an_environment_takes() -> None:
    slow, quick = Counts(), Counts()
    pauses = [(0.03, 0.0, 0.02), (0.0, 0.04, 0.0), (0.01, 0.01, 0.01)]
    made = play_in_rounds([episode(7 + i, 3, of_one) for i, of_one in enumerate(pauses)], InlineEngines(slow))
    assert made == play_in_rounds([episode(7 + i, 3) for i in range(3)], InlineEngines(quick))
    assert slow.calls == quick.calls


def test_there_may_be_no_episode_or_none_that_asks() -> None:
    engines = Counts()
    assert play_in_rounds([], InlineEngines(engines)) == []
    assert play_in_rounds([episode(5, 0)], InlineEngines(engines)) == [[5]]
    assert (engines.calls, engines.forgotten) == ([], 0)


def test_of_several_failures_in_a_round_the_first_is_raised_and_the_others_end() -> None:
    ended: list[int] = []

    def fails(number: int, pause: float) -> Play[None]:
        async def play(ask: Ask) -> None:
            await ask(Request((number,), GREEDY, None))
            await asyncio.sleep(pause)
            raise ValueError(f"episode {number}")

        return play

    async def goes_on(ask: Ask) -> None:
        try:
            while True:
                await ask(Request((0,), GREEDY, None))
        finally:
            ended.append(0)

    engines = Counts()
    with pytest.raises(ValueError, match="episode 4"):
        play_in_rounds([goes_on, fails(4, 0.02), fails(5, 0.0)], InlineEngines(engines))
    assert ended == [0]
    assert len(engines.calls) == 1


def test_what_the_engines_raise_is_raised_and_all_episodes_end() -> None:
    ended: list[int] = []

    class Broken(Counts):
        def generate(self, requests: Sequence[Request], *, keep_prefixes: bool = False) -> list[Completion]:
            raise ConnectionError("engine 0 died")

    def waits(number: int) -> Play[None]:
        async def play(ask: Ask) -> None:
            try:
                await ask(Request((number,), GREEDY, None))
            finally:
                ended.append(number)

        return play

    with pytest.raises(ConnectionError, match="engine 0 died"):
        play_in_rounds([waits(1), waits(2)], InlineEngines(Broken()))
    assert sorted(ended) == [1, 2]
