"""The process that runs a user's environments, agents or executors: it loads their file once, and forks for each
episode.

A fork has at once what the file has loaded. It may raise, hang, crash or fill its memory without touching another
episode. Started by hosting.py, which sends it a socket for each episode, and a pipe to tell how its process ended.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import inspect
import json
import os
import random
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

from rlhf_core.data.tool_functions import CalledTools, tools_of
from rlhf_core.data.user_code import check_function, check_maker, check_no_threads, function_of, run_file, user_error
from rlhf_core.environments.engine_handle import EngineHandle, claimed
from rlhf_core.errors import RecipeError, StageError
from rlhf_core.models.image_decoding import encoded_image
from rlhf_core.rewards.function_process import check_signature
from rlhf_core.terminal import is_lent, open_standard_files

ORDER = struct.Struct("!cQ")  # begin or end, and the episode's number
STATUS = struct.Struct("!i")  # with which an episode's process ended; below 0 of a signal
BEGIN, END = b"b", b"e"
_SHOWN_OUTPUT = 64 * 1024  # bytes that an episode may print to the log


def main() -> None:
    control, memory_gib = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    open_standard_files()
    with requests, replies:  # which no fork may hold open
        try:
            function, schemas = _loaded(json.loads(requests.readline()))
        except (RecipeError, StageError) as error:
            replies.write(json.dumps({"error": str(error), "error_type": type(error).__name__}) + "\n")
            return
        replies.write(json.dumps({"ready": True, "schemas": schemas}) + "\n")
    gc.freeze()  # a fork that collects would copy the pages of all that is loaded
    _Host(control, function, memory_gib).run()


def _loaded(request: Mapping[str, Any]) -> tuple[Callable[..., Any], list[dict[str, Any]]]:
    """What makes the environment of an episode or its tools, or plays it, with its options; and schemas of tools."""
    file, name, shown, options = request["file"], request["function"], request["shown"], request["options"]
    check_function(Path(file), name, shown)
    function = function_of(run_file(Path(file), shown), name, shown)
    made: Callable[..., Any] = partial(function, **options)
    schemas: list[dict[str, Any]] = []
    match request["kind"]:
        case "tool":
            tools = tools_of(function, options, f"{shown}:{name}")
            schemas = [tool.schema for tool in tools.values()]
            made = partial(CalledTools, function, options, tools)
        case "environment":
            check_maker(function, options, f"{shown}:{name}")
        case "program":
            check_signature(function, request["parameters"], options, f"{shown}:{name}")
    check_no_threads([threading.main_thread()], shown)
    return made, schemas


@dataclass(frozen=True)
class _Child:
    """The process of an episode, the first of its group."""

    process: int
    watch: int  # descriptor that can be read once the process has ended
    status: int  # pipe for how it ended

    def tell(self) -> None:
        """Of a process that has ended: how. It is not reaped, so that no other process can have its id."""
        ended = os.waitid(os.P_PIDFD, self.watch, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with suppress(BrokenPipeError):  # nobody asks any more
            os.write(self.status, STATUS.pack(status))

    def close(self) -> None:
        os.close(self.watch)
        os.close(self.status)


@dataclass
class _Host:
    """One thread, so that it may fork."""

    control: socket.socket
    function: Callable[..., Any]
    memory_gib: float
    children: dict[int, _Child] = field(default_factory=dict)  # by the episode

    def run(self) -> None:
        """Until the other end of `control` is closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if selector.get_map().get(key.fd) is not key:
                        continue  # an order before it has ended the episode
                    if isinstance(key.data, _Child):
                        selector.unregister(key.fd)
                        key.data.tell()
                    elif key.fileobj is not self.control:
                        _forward(selector, key)
                    elif not self._obey(selector):
                        for number in list(self.children):
                            self._end(selector, number)
                        return

    def _obey(self, selector: selectors.BaseSelector) -> bool:
        """False: there are no more orders."""
        order, descriptors, _, _ = socket.recv_fds(self.control, ORDER.size, 2)
        while order and len(order) < ORDER.size:
            more = self.control.recv(ORDER.size - len(order))
            order = order + more if more else b""
        if not order:
            return False
        kind, number = ORDER.unpack(order)
        if kind == BEGIN:
            self._begin(selector, number, *descriptors)
        else:
            self._end(selector, number)
        return True

    def _begin(self, selector: selectors.BaseSelector, number: int, connection: int, status: int) -> None:
        output, written = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                os.setsid()  # a group of its own, to be ended with all that it starts
                for descriptor in {key.fd for key in selector.get_map().values()} | {status, *self._descriptors()}:
                    os.close(descriptor)
                os.dup2(written, 2)
                if not is_lent():
                    os.dup2(written, 1)
                _play(socket.socket(fileno=connection), self.function, self.memory_gib)
            except BaseException:  # whatever it is, a fork must not become a second host
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(written)
        os.close(connection)
        selector.register(output, selectors.EVENT_READ, data=_SHOWN_OUTPUT)
        child = self.children[number] = _Child(process, os.pidfd_open(process), status)
        selector.register(child.watch, selectors.EVENT_READ, data=child)

    def _descriptors(self) -> set[int]:
        """Of other episodes, which no fork may hold open."""
        return {descriptor for child in self.children.values() for descriptor in (child.watch, child.status)}

    def _end(self, selector: selectors.BaseSelector, number: int) -> None:
        # Not reaped before: no other process can have its id.
        child = self.children.pop(number)
        os.kill(child.process, signal.SIGKILL)  # it may not have its group yet
        with suppress(ProcessLookupError):
            os.killpg(child.process, signal.SIGKILL)
        os.waitpid(child.process, 0)
        if child.watch in selector.get_map():
            selector.unregister(child.watch)
        child.close()


def _forward(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Write what an episode printed to the log, up to a limit."""
    printed, left = os.read(key.fd, 1 << 16), key.data
    if not printed:
        selector.unregister(key.fd)
        os.close(key.fd)
        return
    if left > 0:
        os.write(2, printed[:left])
        if len(printed) >= left:
            os.write(2, f"\n[an episode has printed {_SHOWN_OUTPUT} bytes; the rest is left out]\n".encode())
    selector.modify(key.fd, selectors.EVENT_READ, data=left - len(printed))


def _play(connection: socket.socket, function: Callable[..., Any], memory_gib: float) -> None:
    """One episode, in a process of its own."""
    taken = psutil.Process().memory_info()
    most = getattr(taken, "data", taken.vms) + int(memory_gib * 2**30)  # data: on Linux
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    environment: Any = None
    requests = map(json.loads, _lines(connection))
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
                answer = json.dumps({"value": value}, default=_as_json)
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                answer = json.dumps({"error": user_error(error)})
            with suppress(ConnectionError):  # nothing listens any more, which `_lines` notices
                connection.sendall(answer.encode() + b"\n")
            if "executor" in request:  # a thread of the handle waits for the next line
                signal.pause()


def _called(runner: asyncio.Runner, function: Callable[..., Any], *arguments: Any) -> Any:
    value = function(*arguments)
    return runner.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Ends this process, with all that it has started, once nobody listens, even while the user's code runs."""
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        with suppress(ConnectionError):
            for line in connection.makefile("rb"):
                lines.put(line)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def _seed(seed: int) -> None:
    """Random numbers are the episode's own; those of all forks would be the same."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)  # a fork has not the threads of OpenMP that its parent may have started


def _as_json(value: Any) -> Any:
    """A number of numpy or torch as JSON has it; an image, as a file's bytes or of PIL, as a data URL."""
    if hasattr(value, "save") and hasattr(value, "convert"):
        value = encoded_image(value)
    if isinstance(value, bytes):
        return f"data:image/png;base64,{base64.b64encode(value).decode()}"
    with suppress(AttributeError, ValueError, RuntimeError):  # it is none, or several
        return value.item()
    raise TypeError(f"{type(value).__name__} is no text, number, list, mapping or image")


if __name__ == "__main__":
    main()
