"""The process that hosts a user's environments, agents or executors: it loads their file once and forks per episode.

A fork starts with the file loaded. It may raise, hang, crash or exhaust its memory without affecting another episode.
Started by hosting.py.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.errors import RecipeError, StageError
from rlhf_core.processes.engine_handle import EngineHandle, claimed
from rlhf_core.processes.fork_server import ForkServer, Request, received_files
from rlhf_core.processes.function_process import check_signature
from rlhf_core.processes.json_values import as_json
from rlhf_core.processes.lines import open_pipes, received
from rlhf_core.processes.program_forms import PROGRAMS, player_of, prepare
from rlhf_core.processes.user_code import (
    check_function,
    check_maker,
    check_no_threads,
    function_of,
    run_file,
    user_error,
)
from rlhf_core.system.terminal import is_lent

_SHOWN_OUTPUT = 64 * 1024  # bytes that an episode may print to the log


def main() -> None:
    control, memory_gib = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])
    requests, replies = open_pipes()
    with requests, replies:  # which no fork may hold open
        try:
            function, schemas = _loaded(json.loads(requests.readline()))
        except (RecipeError, StageError) as error:
            replies.write(json.dumps({"error": str(error), "error_type": type(error).__name__}) + "\n")
            return
        replies.write(json.dumps({"ready": True, "schemas": schemas}) + "\n")
    _Host(control, function, memory_gib).run()


def _loaded(request: Mapping[str, Any]) -> tuple[Callable[..., Any], list[dict[str, Any]]]:
    """Return the factory of an episode's environment or tools, or its player, with the options; and tool schemas."""
    file, name, shown, options = request["file"], request["function"], request["shown"], request["options"]
    check_function(Path(file), name, shown)
    prepare(request["kind"], request["form"])
    function = function_of(run_file(Path(file), shown), name, shown)
    factory: Callable[..., Any] = partial(function, **options)
    schemas: list[dict[str, Any]] = []
    match request["kind"]:
        case "tool":
            from rlhf_core.processes.tool_functions import CalledTools, tools_of  # loads Pydantic

            tools = tools_of(function, options, f"{shown}:{name}")
            schemas = [tool.schema for tool in tools.values()]
            factory = partial(CalledTools, function, options, tools)
        case "environment":
            check_maker(function, options, f"{shown}:{name}")
        case "program" if request["form"] in PROGRAMS:
            factory = player_of(request["form"], function, options, f"{shown}:{name}")
        case "program":
            check_signature(function, request["parameters"], options, f"{shown}:{name}")
    check_no_threads([threading.main_thread()], shown)
    return factory, schemas


@dataclass
class _Host:
    control: socket.socket
    function: Callable[..., Any]
    memory_gib: float

    def run(self) -> None:
        """Serve until the other end of `control` is closed."""
        self._server = ForkServer(self.control, self._accept)
        self._server.serve()

    def _accept(self) -> Request | None:
        files = received_files(self.control, 2)
        if not files:
            return None
        connection, lifeline = files
        output, written = os.pipe()
        self._server.watch(output, _Output(self._server, output).forward)

        def play() -> None:
            os.dup2(written, 2)
            if not is_lent():
                os.dup2(written, 1)
            _play(socket.socket(fileno=connection), self.function, self.memory_gib)

        return Request(play, (connection, written), socket.socket(fileno=lifeline))


@dataclass
class _Output:
    """The output of an episode."""

    server: ForkServer
    pipe: int
    left: int = _SHOWN_OUTPUT

    def forward(self) -> None:
        """Write the output to the log, up to a limit."""
        printed = os.read(self.pipe, 1 << 16)
        if not printed:
            self.server.forget(self.pipe)
            return
        if self.left > 0:
            os.write(2, printed[: self.left])
            if len(printed) >= self.left:
                os.write(2, f"\n[an episode has printed {_SHOWN_OUTPUT} bytes; the rest is left out]\n".encode())
        self.left -= len(printed)


def _play(connection: socket.socket, function: Callable[..., Any], memory_gib: float) -> None:
    """Run one episode, in a process of its own."""
    taken = psutil.Process().memory_info()
    most = getattr(taken, "data", taken.vms) + int(memory_gib * 2**30)  # data: on Linux
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    environment: Any = None
    requests = received(connection.makefile("r", encoding="utf-8"))
    with asyncio.Runner() as runner:
        for request in requests:
            if "seed" in request:
                _seed(request["seed"])
            try:
                match request:
                    case {"row": row}:
                        environment = function()
                        reset = getattr(environment, "reset", None)
                        value = row["prompt"] if reset is None else _called(runner, reset, row)
                    case {"reply": reply}:
                        value = _called(runner, environment.step, reply)
                    case {"agent": arguments}:
                        value = _called(runner, partial(function, **arguments))
                    case {"executor": arguments}:
                        engine = EngineHandle(connection, requests)
                        value = claimed(_called(runner, partial(function, engine, **arguments)))
                answer = json.dumps({"value": value}, default=as_json)
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                answer = json.dumps({"error": user_error(error)})
            with suppress(ConnectionError):  # nothing listens any more, which `received` notices
                connection.sendall(answer.encode() + b"\n")
            if "executor" in request:  # a thread of the handle waits for the next line
                signal.pause()


def _called(runner: asyncio.Runner, function: Callable[..., Any], *arguments: Any) -> Any:
    value = function(*arguments)
    return runner.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _seed(seed: int) -> None:
    """Seed the random generators per episode; those of all forks would be the same."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)  # a fork has not the threads of OpenMP that its parent may have started


if __name__ == "__main__":
    main()
