"""Episodes in processes of their own: forks of a process that has loaded the user's file."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rlhf_core.config.environments.environments import CodeEnvironment, ProgramConfig
from rlhf_core.config.environments.tools import FunctionTool
from rlhf_core.errors import EpisodeError
from rlhf_core.processes.forked import LONGEST_LINE, ForkedProcess
from rlhf_core.processes.lines import ProcessError
from rlhf_core.processes.user_code import CodeKind
from rlhf_core.processes.user_process import UserFunction, UserProcess

_OPEN_FILES = 65_536
_DATA_URL = re.compile(rb"data:image/[\w.+-]+;base64,[A-Za-z0-9+/=]*")


class EpisodeHost:
    """The process that has loaded the file, and forks for each episode."""

    def __init__(
        self,
        config: CodeEnvironment | FunctionTool,
        file: Path,
        kind: CodeKind,
        *,
        log: IO[bytes] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Load the file. log, folder: see UserProcess.

        Raises RecipeError, StageError or RewardError if the file cannot be loaded.
        """
        _allow_many_files()
        self._control, child_end = socket.socketpair()
        parameters = config.parameters if isinstance(config, CodeEnvironment) else ()
        form = config.form if isinstance(config, ProgramConfig) else "alignment"
        function = UserFunction(file, config.function, config.path, parameters, config.options, kind, form)
        program = ("rlhf_core.processes.host_process", str(child_end.fileno()), str(config.memory_gib))
        self._process = UserProcess(function, program=program, descriptors=[child_end.fileno()], log=log, folder=folder)
        with child_end:
            self._process.start()
        self.loaded = self._process.loaded  # the process's reply about the file

    def new(self) -> EpisodeProcess:
        return EpisodeProcess(self._control)

    def close(self) -> None:
        self._control.close()  # ends the host, and with it its remaining episodes
        self._process.close(after_seconds=5.0)


class EpisodeProcess(ForkedProcess):
    """The process of one episode. Its failures are EpisodeErrors."""

    longest_line = 2**26  # with images; of all other text a message has LONGEST_LINE bytes at most

    async def send(self, message: Mapping[str, Any]) -> None:
        try:
            await super().send(message)
        except ProcessError as error:
            raise _dead(error) from error

    async def line(self) -> bytes:
        line = await super().line()
        if len(line) > LONGEST_LINE and len(_DATA_URL.sub(b"", line)) > LONGEST_LINE:
            raise asyncio.LimitOverrunError("a message is too long without its images", len(line))
        return line

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises EpisodeError also if the user's code has raised an error."""
        try:
            message = await super().receive()
        except ProcessError as error:
            raise _dead(error) from error
        except ValueError as error:
            raise _no_answer() from error
        except asyncio.LimitOverrunError as error:
            raise EpisodeError(
                f"it answered with more than {LONGEST_LINE // 2**20} MiB of text, or {self.longest_line // 2**20} MiB "
                "with images"
            ) from error
        if not isinstance(message, dict):
            raise _no_answer()
        if "error" in message:
            raise EpisodeError(f"it raised {message['error']}")
        return message

    async def value(self) -> Any:
        """Return the return value of the user's code: the next message."""
        message = await self.receive()
        if "value" not in message:
            raise _no_answer()
        return message["value"]


def _dead(how: ProcessError) -> EpisodeError:
    return EpisodeError(f"before it answered, its process {how}; see the log")


def _no_answer() -> EpisodeError:
    return EpisodeError("its process wrote something to our socket that is not an answer")


def _allow_many_files() -> None:
    """Raise the limit of open files: an episode needs a socket here, and two descriptors in the host."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))
