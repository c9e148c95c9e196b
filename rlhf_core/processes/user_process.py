"""A function of a Python file in a child process of its own, which is killed if it hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlhf_core.errors import RecipeError, RewardError
from rlhf_core.processes.lines import LineProcess, ProcessError
from rlhf_core.processes.user_code import CodeKind
from rlhf_core.system.terminal import limited


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function to load; it is called with `parameters` and `options`, all by name."""

    file: Path
    function: str
    shown: str  # the path as the recipe writes it, for messages
    parameters: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: CodeKind = "function"
    form: str = "alignment"  # see reward_forms.py and program_forms.py; alignment: called by name with `parameters`

    @property
    def name(self) -> str:
        return f"{self.shown}:{self.function}"


class UserProcess:
    """A child process, started at the first call and restarted after a failure, that exchanges lines of JSON.

    Raises RecipeError if the function cannot be called with its parameters, RewardError if its process raises, dies or
    times out.
    """

    def __init__(
        self,
        function: UserFunction,
        loading_seconds: float = 120.0,
        program: Sequence[str] = ("rlhf_core.processes.function_process",),
        descriptors: Sequence[int] = (),
        log: IO[bytes] | None = None,
        folder: Path | None = None,
    ):
        """loading_seconds: limit for importing the file, which may load models; calls have their own limit.

        program: the child's module and its arguments. descriptors: files that it inherits. log: target of its output;
        none: that of this process. folder: working folder; none: that of this process.
        """
        self._function = function
        self._program, self._descriptors, self._log, self._folder = program, descriptors, log, folder
        self._loading_seconds = loading_seconds
        self.loaded: dict[str, Any] = {}  # the child's reply about the function
        self._process: LineProcess | None = None

    def start(self) -> None:
        """Load the function, unless it is loaded."""
        if self._process is None:
            try:
                self._load()
            except RecipeError:
                self.close()  # nothing in it can be called
                raise

    def load(self, function: UserFunction) -> None:
        """Load another function in place of the last one. A file is not run again in the same process."""
        self._function = function
        self._load()

    def _load(self) -> None:
        function, seconds = self._function, self._loading_seconds
        request = {
            "file": str(function.file), "function": function.function, "shown": function.shown,
            "parameters": function.parameters, "options": function.options,
            "kind": function.kind, "form": function.form,
        }  # fmt: skip
        self.loaded = self._exchange(request, seconds, f"could not be loaded within {seconds:g} s")

    def call(self, arguments: Sequence[Any], seconds: float) -> dict[str, Any]:
        """Call `function(*arguments)`. arguments: JSON values, one per parameter.

        The reply has `values`, a list or None, and `type`, the name of the returned type.
        """
        self.start()
        return self._exchange({"batch": arguments}, seconds, f"did not return within {seconds:g} s")

    def close(self, *, after_seconds: float = 0.0) -> None:
        """End the process, after `after_seconds` to end by itself."""
        if self._process is not None:
            self._process.close(after_seconds=after_seconds)
            self._process = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process starts its own child there.
        return self.__dict__ | {"_process": None}

    def _exchange(self, request: Mapping[str, Any], seconds: float, on_timeout: str) -> dict[str, Any]:
        if self._process is None:
            # Unbuffered: its output is in the log, however it ends.
            arguments = ["-u", "-m", *self._program]
            self._process = LineProcess(arguments, log=self._log, folder=self._folder, descriptors=self._descriptors)
        try:
            return self._reply(self._process, request, seconds, on_timeout)
        except RewardError:
            self.close()
            raise

    def _reply(
        self, process: LineProcess, request: Mapping[str, Any], seconds: float, on_timeout: str
    ) -> dict[str, Any]:
        name = self._function.name
        try:
            reply: dict[str, Any] = process.exchange(request, limited(seconds))
        except TimeoutError as error:
            raise RewardError(f"{name} {on_timeout} and was stopped") from error
        except ProcessError as error:
            raise RewardError(f"{name}: its process {error}, before it returned; see the log") from error
        except ValueError as error:
            raise RewardError(
                f"{name}: its process replied with invalid JSON: does the file replace parts of the module `json`?"
            ) from error
        if reply.get("error_type") == "RecipeError":  # of the function: its file has been run
            raise RecipeError(reply["error"])
        if "error" in reply:
            raise RewardError(reply["error"] if "error_type" in reply else f"{name} raised {reply['error']}")
        return reply
