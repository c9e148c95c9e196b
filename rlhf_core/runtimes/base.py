"""The interface of a runtime: start from an image, write files, run commands, read files, stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WORKDIR = "/app"  # of a runtime whose image names none
MOST_OUTPUT = 64 * 1024  # bytes of a command that are kept
MOST_READ = 16 * 2**20  # bytes of a file that is read
# Limits that end a command, with all of its processes. A runtime need not have all of them.
Limit = Literal["", "time", "memory", "files"]


@dataclass(frozen=True, slots=True)
class Image:
    """The files that a runtime starts with."""

    name: str | None = None  # of a container image
    context: Mapping[str, bytes] = field(default_factory=dict)  # files to build it from, one of them a Dockerfile
    variables: Mapping[str, str] = field(default_factory=dict)  # of all commands

    @property
    def builds(self) -> bool:
        return "Dockerfile" in self.context


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a command."""

    output: str  # standard output and error, the first MOST_OUTPUT bytes
    status: int  # its exit status
    stopped: Limit = ""  # the limit that ended it; empty: it ended by itself
    cut: bool = False  # there was more output


class Runtime(ABC):
    """A started runtime. Commands share its files, and no processes: those of a command end with it.

    Paths are absolute, or relative to the folder of commands. A failure that is not a command's raises EpisodeError,
    whose message is the cause alone.
    """

    @abstractmethod
    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, executable, by path. Missing folders are made; other files are replaced."""

    @abstractmethod
    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        """Run a command of bash. After `seconds` all of its processes are killed. variables: of this command alone."""

    @abstractmethod
    async def read(self, path: str) -> bytes | None:
        """Return the content of a file; None if there is none. Raises EpisodeError beyond MOST_READ bytes."""

    @abstractmethod
    def stop(self) -> None:
        """Kill its processes and remove its files. Idempotent. May return before that is done."""


class RuntimeHost(ABC):
    """Starts runtimes on behalf of a stage."""

    name: str  # in messages

    @abstractmethod
    async def start(self, image: Image) -> Runtime:
        """Start a runtime. Raises EpisodeError if it cannot be started from the image."""

    @abstractmethod
    def close(self) -> None:
        """Stop all runtimes, and return when that is done."""
