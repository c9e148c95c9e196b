"""The contract of a runtime: files and limits of its own, and no process that outlives its command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import TypeVar

import pytest

from rlhf_core.runtimes.base import MOST_OUTPUT, Image, Runtime, RuntimeHost

T = TypeVar("T")


class RuntimeContract:
    """Subclass it with `make`, and an `image` if it needs one. Its commands are run by bash, with coreutils."""

    image = Image()
    has_network = False
    hasty_seconds = 3.0  # in which a command begins
    passes_output_on = True  # of a command that runs: what it printed before it was stopped is kept

    def make(self) -> RuntimeHost:
        raise NotImplementedError

    @pytest.fixture
    def runtimes(self) -> Iterator[RuntimeHost]:
        with closing(self.make()) as runtimes:
            yield runtimes

    @asynccontextmanager
    async def started(self, runtimes: RuntimeHost) -> AsyncIterator[Runtime]:
        runtime = await runtimes.start(self.image)
        try:
            yield runtime
        finally:
            runtime.stop()
            runtime.stop()

    def used(self, runtimes: RuntimeHost, use: Callable[[Runtime], Awaitable[T]]) -> T:
        async def play() -> T:
            async with self.started(runtimes) as runtime:
                return await use(runtime)

        return asyncio.run(play())

    def test_a_command_has_output_and_status(self, runtimes: RuntimeHost) -> None:
        async def use(runtime: Runtime) -> None:
            ran = await runtime.run("echo out; echo err >&2; exit 3", 20.0)
            assert (ran.output, ran.status, ran.stopped, ran.cut) == ("out\nerr\n", 3, "", False)
            ran = await runtime.run('echo "$GIVEN"; cat', 20.0, {"GIVEN": "a b"})
            assert (ran.output, ran.status) == ("a b\n", 0), "variables are given, and there is no input"

        self.used(runtimes, use)

    def test_files_go_in_and_out_unchanged(self, runtimes: RuntimeHost) -> None:
        content = bytes(range(256)) * 300

        async def use(runtime: Runtime) -> None:
            await runtime.write({"own": content, "/opt/new/folder/script": b"#!/bin/bash\necho ran $1\n"})
            assert await runtime.read("own") == content
            assert (await runtime.run("wc -c < own; /opt/new/folder/script it", 20.0)).output == "76800\nran it\n"
            await runtime.run("echo changed > own; mkdir there; mkfifo pipe", 20.0)
            assert await runtime.read("own") == b"changed\n"
            assert [await runtime.read(path) for path in ("missing", "there", "pipe", "own/below")] == [None] * 4
            await runtime.write({"own": b""})
            assert await runtime.read("own") == b""

        self.used(runtimes, use)

    def test_commands_share_files(self, runtimes: RuntimeHost) -> None:
        async def use(runtime: Runtime) -> str:
            await runtime.run("cd /tmp; echo kept > kept; export LOST=1", 20.0)
            return (await runtime.run("cat /tmp/kept; echo [$LOST]", 20.0)).output

        assert self.used(runtimes, use) == "kept\n[]\n"

    def test_runtimes_side_by_side_see_nothing_of_each_other(self, runtimes: RuntimeHost) -> None:
        async def together() -> list[str]:
            async with self.started(runtimes) as first, self.started(runtimes) as second:
                await asyncio.gather(first.run("echo 1 > own", 20.0), second.run("echo 2 > own", 20.0))
                return [(await each.run("cat own; ls", 20.0)).output for each in (first, second)]

        assert asyncio.run(together()) == ["1\nown\n", "2\nown\n"]

    def test_a_time_limit_kills_every_process_of_a_command(self, runtimes: RuntimeHost) -> None:
        """Also those that left its group, and its session."""
        forever = "while :; do date +%s%N >> {name}; sleep 0.05; done"
        quoted = [f"'{forever.format(name=name)}'" for name in "abc"]
        command = f"echo begun; bash -c {quoted[0]} & (setsid bash -c {quoted[1]} &) ; bash -c {quoted[2]}"

        async def use(runtime: Runtime) -> None:
            began = time.monotonic()
            ran = await runtime.run(command, self.hasty_seconds)
            assert (ran.output, ran.stopped) == ("begun\n" if self.passes_output_on else "", "time")
            assert time.monotonic() - began < 30, "it has returned long before the command would have"
            await self.require_nothing_runs(runtime)

        self.used(runtimes, use)

    def test_no_process_outlives_its_command(self, runtimes: RuntimeHost) -> None:
        forever = "(setsid bash -c 'while :; do date +%s%N >> a; sleep 0.05; done' &)"
        command = f"{forever}; until [ -s a ]; do sleep 0.05; done; echo done"

        async def use(runtime: Runtime) -> None:
            assert (await runtime.run(command, 20.0)).output == "done\n"
            await self.require_nothing_runs(runtime)

        self.used(runtimes, use)

    async def require_nothing_runs(self, runtime: Runtime) -> None:
        before = (await runtime.run("cat a b c 2> /dev/null", 20.0)).output
        assert before
        await asyncio.sleep(0.4)
        assert (await runtime.run("cat a b c 2> /dev/null", 20.0)).output == before

    def test_output_is_bounded(self, runtimes: RuntimeHost) -> None:
        async def use(runtime: Runtime) -> None:
            ran = await runtime.run("head -c 5000000 /dev/zero | tr '\\0' x; echo end > end", 60.0)
            assert (len(ran.output), set(ran.output), ran.cut, ran.status) == (MOST_OUTPUT, {"x"}, True, 0)
            assert await runtime.read("end") == b"end\n", "it was not killed for its output"

        self.used(runtimes, use)

    def test_the_network_cannot_be_reached(self, runtimes: RuntimeHost) -> None:
        if self.has_network:
            pytest.skip("it is configured with one")

        async def use(runtime: Runtime) -> str:
            return (await runtime.run("tail -n +3 /proc/net/dev | cut -d : -f 1 | tr -d ' '", 20.0)).output

        assert self.used(runtimes, use) == "lo\n"

    def test_a_command_that_cannot_be_read_is_a_result(self, runtimes: RuntimeHost) -> None:
        async def use(runtime: Runtime) -> None:
            for command in ("no-such-program", "if", "\0", "x" * 2**20):
                ran = await runtime.run(command, 20.0)
                assert ran.status
                assert ran.output
            assert (await runtime.run("echo \xff ä", 20.0)).output == "\xff ä\n"

        self.used(runtimes, use)
