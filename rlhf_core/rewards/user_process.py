"""A function of a Python file in a child process of its own, which is killed if it hangs."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import rlhf_core
from rlhf_core.children import how_it_ended
from rlhf_core.data.user_code import CodeKind
from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.terminal import limited

_ENDING_SECONDS = 5.0  # that a process may take to end once it has closed its files


@dataclass(frozen=True, slots=True)
class UserFunction:
    """What to load. Its function is called with `parameters` and `options`, all by name."""

    file: Path
    function: str
    shown: str  # the path as the recipe writes it, for messages
    parameters: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: CodeKind = "function"

    @property
    def name(self) -> str:
        return f"{self.shown}:{self.function}"


class UserProcess:
    """The child is started at the first call and restarted after a failure. The two exchange lines of JSON.

    Everything wrong is an error: RecipeError if the function is none that can be called so, RewardError if its process
    raises, dies or takes too long.
    """

    def __init__(
        self,
        function: UserFunction,
        loading_seconds: float = 120.0,
        program: Sequence[str] = ("rlhf_core.rewards.function_process",),
        descriptors: Sequence[int] = (),
        log: IO[bytes] | None = None,
        folder: Path | None = None,
    ):
        """loading_seconds: that importing the file may take, which may load models; calls have their own limit.

        program: the child's module and its arguments. descriptors: files that it inherits. log: where what it prints
        goes; none: to this process's own. folder: its working folder; none: this process's own.
        """
        self._function = function
        self._program, self._descriptors, self._log, self._folder = program, descriptors, log, folder
        self._loading_seconds = loading_seconds
        self.loaded: dict[str, Any] = {}  # what the child said of the function
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def start(self) -> None:
        """Load the function, unless it is loaded."""
        if self._child is None:
            self._start_child()
            try:
                self._load()
            except RecipeError:
                self.close()  # nothing in it can be called
                raise

    def load(self, function: UserFunction) -> None:
        """Load another function in place of the last one. A process that has run its file does not run it again."""
        self._function = function
        if self._child is None:
            self._start_child()
        self._load()

    def _start_child(self) -> None:
        home = str(Path(rlhf_core.__file__).parents[1])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        self._unread = b""
        self._child = subprocess.Popen(
            # What it prints is in the log at once, however it ends; modules are not looked for here.
            [sys.executable, "-u", "-P", "-m", *self._program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # to end it with all that it has started
            pass_fds=self._descriptors,
        )

    def _load(self) -> None:
        function, seconds = self._function, self._loading_seconds
        request = {
            "file": str(function.file), "function": function.function, "shown": function.shown,
            "parameters": function.parameters, "options": function.options,
            "kind": function.kind,
        }  # fmt: skip
        self.loaded = self._exchange(request, seconds, f"could not be loaded within {seconds:g} s")

    def call(self, arguments: Sequence[Any], seconds: float) -> dict[str, Any]:
        """The reply to `function(*arguments)`, JSON values, one for each parameter: `values`, a list or None, and
        `type`, the name of the returned type."""
        self.start()
        return self._exchange({"batch": arguments}, seconds, f"did not return within {seconds:g} s")

    def close(self, *, after_seconds: float = 0.0) -> None:
        """after_seconds: that it has to end by itself."""
        if self._child is not None:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(after_seconds)
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.communicate()
            self._child = None

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process starts its own child there.
        return self.__dict__ | {"_child": None, "_unread": b""}

    def _exchange(self, request: Mapping[str, Any], seconds: float, on_timeout: str) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
            most = limited(seconds)
            line = self._read_line(None if most is None else time.monotonic() + most, on_timeout)
        except BrokenPipeError as error:
            raise self._died() from error
        except RewardError:
            self.close()
            raise
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError as error:
            self.close()
            raise RewardError(
                f"{self._function.name}: its process answered what is no JSON: what of `json` does the file replace?"
            ) from error
        if reply.get("error_type") == "RecipeError":  # of the function: its file has been run
            raise RecipeError(reply["error"])
        if "error" in reply:
            self.close()
            of_file = "error_type" in reply
            raise RewardError(reply["error"] if of_file else f"{self._function.name} raised {reply['error']}")
        return reply

    def _read_line(self, deadline: float | None, on_timeout: str) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not selector.select(timeout=left):
                    raise RewardError(f"{self._function.name} {on_timeout} and was stopped")
                received = os.read(self._child.stdout.fileno(), 1 << 20)
                if not received:
                    raise self._died()
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> RewardError:
        assert self._child is not None
        try:
            ended = how_it_ended(self._child.wait(_ENDING_SECONDS))
        except subprocess.TimeoutExpired:
            ended = "closed its files"
        self.close()
        return RewardError(f"{self._function.name}: its process {ended}, before it returned; see the log")
