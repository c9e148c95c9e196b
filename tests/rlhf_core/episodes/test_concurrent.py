"""Episodes side by side: none waits for another, whichever engine they ask."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhf_core.episodes.concurrent import play_concurrently
from rlhf_core.episodes.engine_queue import RefusedRequestError
from rlhf_core.episodes.rounds import Ask, Play
from rlhf_core.episodes.stream import Stream
from rlhf_core.errors import ActorDiedError
from rlhf_core.rollout.engine import Refused, Request, SamplingParameters, Unfinished
from rlhf_core.rollout.engines import OneEngine
from rlhf_core.types import Completion

GREEDY = SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=4, stop_token_ids=())


@dataclass
class Queueing:
    """Completes a prompt with its length, one request a call, in the order in which they came."""

    waiting: dict[int, Request] = field(default_factory=dict)
    prompts: list[Sequence[int]] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    calls: int = 0

    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
        self.calls += 1
        assert not self.waiting.keys() & requests.keys()
        for number in abandoned:
            self.waiting.pop(number, None)
            self.abandoned.append(number)
        self.waiting.update(requests)
        if not self.waiting:
            return {}
        number = next(iter(self.waiting))
        prompt = self.waiting.pop(number).prompt
        self.prompts.append(prompt)
        return {number: Completion((len(prompt),), (0.0,), "stop", 0)}


class Several(OneEngine):
    def __init__(self, *engines: Queueing) -> None:
        super().__init__()
        self.engines = engines

    @property
    def size(self) -> int:
        return len(self.engines)

    def call_on(self, index: int, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engines[index], method.__name__)(*args, **kwargs)

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise AssertionError("engines are called one by one")


def episode(number: int, turns: int) -> Play[list[int]]:
    async def play(ask: Ask) -> list[int]:
        tokens = [number]
        for _ in range(turns):
            tokens += (await ask(Request(tuple(tokens), GREEDY, None))).token_ids
        return tokens

    return play


def test_each_gets_its_own_replies_from_one_engine() -> None:
    engines = Several(Queueing(), Queueing())
    made = play_concurrently([episode(70, 2), episode(80, 0), episode(90, 3), episode(60, 1)], engines)
    assert made == [[70, 1, 2], [80], [90, 1, 2, 3], [60, 1]]
    first, second = engines.engines
    assert first.prompts == [(70,), (70, 1)]
    assert sorted(second.prompts) == [(60,), (90,), (90, 1), (90, 1, 2)]
    assert not first.waiting
    assert not second.waiting


def test_episodes_that_begin_together_are_shared_by_all_engines() -> None:
    first, second = Queueing(), Queueing()

    async def four() -> None:
        asks = [stream.asker() for _ in range(4)]  # before any has asked for a reply
        await asyncio.gather(*(ask(Request((number,), GREEDY, None)) for number, ask in enumerate(asks)))

    with Stream(Several(first, second)) as stream:
        stream.call(four())
    assert (sorted(first.prompts), sorted(second.prompts)) == ([(0,), (2,)], [(1,), (3,)])


def test_an_environment_that_takes_its_time_holds_up_no_other() -> None:
    others_are_over = threading.Event()

    async def slow(ask: Ask) -> str:
        await ask(Request((1,), GREEDY, None))
        while not others_are_over.is_set():  # played in rounds this would never end
            await asyncio.sleep(0.01)
        return "last"

    def quick(number: int) -> Play[str]:
        async def play(ask: Ask) -> str:
            for _ in range(3):
                await ask(Request((number,), GREEDY, None))
            if number == 4:
                others_are_over.set()
            return "quick"

        return play

    assert play_concurrently([slow, quick(2), quick(3), quick(4)], Several(Queueing())) == ["last"] + ["quick"] * 3


def test_an_engine_that_nobody_asks_is_not_called() -> None:
    async def thinks(ask: Ask) -> int:
        await asyncio.sleep(0.2)
        return 7

    engine = Queueing()
    assert play_concurrently([thinks, episode(5, 1)], Several(engine)) == [7, [5, 1]]
    assert engine.calls == 1
    assert play_concurrently([], Several(engine)) == []


def test_an_episode_that_fails_ends_the_others() -> None:
    ended: list[int] = []

    async def fails(ask: Ask) -> None:
        await ask(Request((0,), GREEDY, None))
        raise ValueError("episode 0")

    async def endless(ask: Ask) -> None:
        try:
            while True:
                await ask(Request((1,), GREEDY, None))
        finally:
            ended.append(1)

    with pytest.raises(ValueError, match="episode 0"):
        play_concurrently([endless, fails, endless], Several(Queueing(), Queueing()))
    assert ended == [1, 1]


def test_an_engine_that_dies_ends_all_while_another_is_at_work() -> None:
    ended: list[int] = []

    class Dies(Queueing):
        def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
            raise ConnectionError("engine 1 died")

    class Works(Queueing):
        def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
            time.sleep(0.05)
            return {}

    async def waits(ask: Ask) -> None:
        try:
            await ask(Request((1,), GREEDY, None))
        finally:
            ended.append(1)

    with pytest.raises(ConnectionError, match="engine 1 died"):
        play_concurrently([waits, waits], Several(Works(), Dies()))
    assert ended == [1, 1]


class Replaced(Several):
    """Two engines, the first of which has died; it can be replaced once no call runs."""

    running = 0

    def __init__(self) -> None:
        super().__init__(Queueing(), Queueing())
        self.dead = True

    def call_on(self, index: int, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if index == 0 and self.dead:
            raise ActorDiedError("engine 0 died")
        self.running += 1
        time.sleep(0.2)
        result = super().call_on(index, method, *args, **kwargs)
        self.running -= 1
        return result

    def replace_dead(self) -> list[str]:
        assert not self.running
        self.engines, self.dead = (Queueing(), Queueing()), False  # without what they had begun
        return ["engine 0"]


def test_a_stream_goes_on_with_an_engine_in_place_of_a_dead_one() -> None:
    with Stream(engines := Replaced()) as stream:
        for _ in range(2):
            with pytest.raises(ActorDiedError, match="engine 0 died"):
                stream.play([episode(1, 1), episode(2, 1)])
        assert stream.replace_dead() == ["engine 0"]
        assert stream.play([episode(1, 1), episode(2, 1)]) == [[1, 1], [2, 1]]
        assert [engine.prompts for engine in engines.engines] == [[(1,)], [(2,)]]


def test_no_engine_is_replaced_while_the_stream_has_another_error() -> None:
    async def fails() -> None:
        raise LookupError("no such row")

    async def begin() -> None:
        stream.begin(fails())
        await asyncio.sleep(0)

    with Stream(engines := Replaced()) as stream:
        stream.call(begin())
        with pytest.raises(LookupError, match="no such row"):
            stream.replace_dead()
    assert engines.dead


def test_what_an_episode_no_longer_waits_for_is_sampled_no_further() -> None:
    class Endless(Queueing):
        """Begins all, and completes what has the prompt 9 alone."""

        def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
            time.sleep(0.02)
            self.waiting |= requests
            for number in abandoned:
                del self.waiting[number]
                self.abandoned.append(number)
            whole = [number for number, request in self.waiting.items() if request.prompt == (9,)]
            return {number: Completion((len(self.waiting.pop(number).prompt),), (0.0,), "stop", 0) for number in whole}

    async def aborts(ask: Ask) -> str:
        calls = [asyncio.create_task(ask(Request((number,), GREEDY, None))) for number in (1, 2, 9)]
        await asyncio.sleep(0.05)
        calls[0].cancel()
        late = asyncio.create_task(ask(Request((3,), GREEDY, None)))  # its turn has not come
        await asyncio.sleep(0)
        late.cancel()
        calls[1].cancel()
        await asyncio.wait(calls)
        await asyncio.sleep(0.1)
        return "over"

    engine = Endless()
    assert play_concurrently([aborts], Several(engine)) == ["over"]
    assert engine.abandoned == [0, 1]
    assert not engine.waiting


def test_a_reply_that_its_episode_no_longer_waits_for_is_dropped() -> None:
    class Late(Queueing):
        def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> dict[int, Completion]:
            time.sleep(0.1)
            return super().advance(requests, abandoned=abandoned)

    async def impatient(ask: Ask) -> str:
        try:
            async with asyncio.timeout(0.02):
                await ask(Request((1,), GREEDY, None))
        except TimeoutError:
            reply = await ask(Request((1, 2), GREEDY, None))
            return f"then {reply.token_ids[0]}"
        return "at once"

    assert play_concurrently([impatient], Several(Late())) == ["then 2"]


class Telling(Queueing):
    """Says what it has of the oldest request twice before it completes it, and refuses structures."""

    def advance(self, requests: Mapping[int, Request], *, abandoned: Sequence[int] = ()) -> Any:
        self.calls += 1
        self.waiting.update(requests)
        if not self.waiting:
            return {}
        number, request = next(iter(self.waiting.items()))
        if request.structure is not None:
            del self.waiting[number]
            return {number: Refused("no grammar")}
        if self.calls < 3:
            return {number: Unfinished((9,) * self.calls, (0.0,) * self.calls)}
        del self.waiting[number]
        return {number: Completion((9,) * 3, (0.0,) * 3, "stop", 0)}


def test_a_listener_hears_what_there_is_so_far() -> None:
    heard: list[Sequence[int]] = []

    async def play(ask: Ask) -> Sequence[int]:
        request = Request((1,), GREEDY, None, streams=True)
        whole: Completion = await ask(request, lambda progress: heard.append(progress.token_ids))
        with pytest.raises(RefusedRequestError, match="no grammar"):
            await ask(Request((2,), GREEDY, None, structure="{}"))
        return whole.token_ids

    (whole,) = play_concurrently([play], Several(Telling()))
    assert (heard, list(whole)) == ([(9,), (9, 9)], [9, 9, 9])
