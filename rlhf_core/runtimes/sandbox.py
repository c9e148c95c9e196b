"""Runtimes on this node: a folder of files, and namespaces for each command (processes/command_process.py)."""

from __future__ import annotations

import asyncio
import base64
import fnmatch
import os
import posixpath
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.config.environments.dockerfile import Step, read_dockerfile
from rlhf_core.config.environments.runtimes import SandboxRuntime
from rlhf_core.errors import EpisodeError, RecipeError, StageError, reason_of
from rlhf_core.processes import command_process
from rlhf_core.processes.lines import ProcessError
from rlhf_core.processes.namespaces import give
from rlhf_core.processes.sandbox import SandboxHost
from rlhf_core.processes.seccomp import command_filter
from rlhf_core.runtimes.base import MOST_OUTPUT, MOST_READ, WORKDIR, Image, Ran, Runtime, RuntimeHost
from rlhf_core.runtimes.rooted import is_folder_below, make_folder_below, read_below, write_below
from rlhf_core.system.scratch import new_folder, remove, remove_tree

# The node's programs and libraries; and the files by which they find each other.
_READABLE = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives",
)  # fmt: skip
_MOST_FILES = 10_000
_MOST_COMMAND = 2**19  # characters
_BUILD_SECONDS = 60.0  # of a RUN
_REFUSAL = (
    "this node cannot run commands confined ({fault}): the runtime `sandbox` needs Linux 5.14 or later, bash, and user "
    "namespaces that unprivileged processes may make, which most containers forbid; use another node, or the runtime "
    "`container` or `remote`"
)


class Sandboxes(RuntimeHost):
    name = "sandbox"

    @classmethod
    def of(cls, config: SandboxRuntime) -> Sandboxes:
        return cls(config)

    def __init__(self, config: SandboxRuntime) -> None:
        """Raises StageError if this node cannot confine commands."""
        python = sys.base_prefix
        paths = [path for path in _READABLE if os.path.lexists(path)]
        readable = paths if python.startswith("/usr") else [*paths, python]
        programs = [f"{top}/{name}" for top in ("/usr/local", "/usr", "") for name in ("sbin", "bin")]
        path = ":".join([f"{python}/bin", *programs])
        settings = {
            "modules": (), "readable": readable, "filter": base64.b64encode(command_filter()).decode(),
            "processes": 2 * len(os.sched_getaffinity(0)), "tasks": config.processes, "output": MOST_OUTPUT,
            "memory": int(config.memory_gib * 2**30), "disk": int(config.disk_gib * 2**30), "files": _MOST_FILES,
            "variables": {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "TZ": "UTC"},
        }  # fmt: skip
        self._host = SandboxHost(Path(command_process.__file__), settings, _REFUSAL)
        self._folder = new_folder("runtimes")

    async def start(self, image: Image) -> Runtime:
        if image.name is not None and not image.builds:
            raise StageError(f"the image {image.name} needs the runtime `container` or `remote`: a sandbox has none")
        try:
            steps = read_dockerfile(image.context["Dockerfile"].decode()) if image.builds else []
        except (RecipeError, UnicodeDecodeError) as error:
            raise StageError(f"the runtime `sandbox` cannot be started: {reason_of(error)}") from error
        root = Path(tempfile.mkdtemp(dir=self._folder))
        runtime = SandboxedFiles(self._host, root, dict(image.variables))
        try:
            await runtime.follow(steps, image.context)
        except BaseException:
            runtime.stop()
            raise
        return runtime

    def close(self) -> None:
        self._host.close()
        for root in self._folder.iterdir():
            _permit(root)
        remove(self._folder)


class SandboxedFiles(Runtime):
    """The files of a runtime, in which each command has its own namespaces."""

    def __init__(self, host: SandboxHost, root: Path, variables: dict[str, str]) -> None:
        self._host, self._root, self._variables = host, root, variables
        self._open = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        give(self._open)
        self._workdir = WORKDIR
        self._stopped = False

    async def follow(self, steps: list[Step], context: Mapping[str, bytes]) -> None:
        """Follow the steps of a Dockerfile. Raises EpisodeError if one fails."""
        for step in steps:
            match step:
                case Step("WORKDIR", (folder,)):
                    self._workdir = self._absolute(folder)
                    await asyncio.to_thread(make_folder_below, self._open, self._workdir)
                case Step("ENV", (name, value)):
                    self._variables.setdefault(name, value)
                case Step("COPY", (*sources, target)):
                    into_folder = is_folder_below(self._open, self._absolute(target))
                    await self.write(_copies(sources, target, context, into_folder=into_folder))
                case Step("RUN", (command,)):
                    ran = await self.run(command, _BUILD_SECONDS)
                    if ran.status or ran.stopped:
                        why = ran.stopped or f"status {ran.status}"
                        raise EpisodeError(
                            f"`RUN {command[:80]}` of its Dockerfile failed ({why}): {ran.output[-300:]}"
                        )

    async def write(self, files: Mapping[str, bytes]) -> None:
        def write() -> None:
            for path, content in files.items():
                write_below(self._open, self._absolute(path), content)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            raise EpisodeError(f"a file cannot be written into its sandbox: {reason_of(error)}") from error

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        if len(command) > _MOST_COMMAND or "\0" in command:
            return Ran(f"bash: a command has at most {_MOST_COMMAND} characters, none of them NUL\n", 126)
        await self._host.started()
        request = {
            "root": str(self._root), "command": command, "folder": self._workdir, "seconds": seconds,
            "variables": self._variables | dict(variables or {}),
        }  # fmt: skip
        try:
            ran = await self._host.ask(request)
        except ProcessError as error:
            raise EpisodeError(f"the process that runs its command has ended: it {error}; see the log") from error
        if "fault" in ran:
            raise EpisodeError(f"a command could not be started in its sandbox: {ran['fault']}")
        return Ran(**ran)

    async def read(self, path: str) -> bytes | None:
        try:
            content = await asyncio.to_thread(read_below, self._open, self._absolute(path), MOST_READ)
        except OSError as error:
            raise EpisodeError(f"{path} cannot be read: {reason_of(error)}") from error
        if content is not None and len(content) > MOST_READ:
            raise EpisodeError(f"{path} has more than {MOST_READ // 2**20} MiB")
        return content

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            os.close(self._open)
            _permit(self._root)
            remove_tree(self._root)

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._workdir, path))


def _copies(sources: list[str], target: str, context: Mapping[str, bytes], *, into_folder: bool) -> dict[str, bytes]:
    """Return the files of a COPY, by target. Raises EpisodeError if there is none.

    into_folder: the target is a folder.
    """
    files: dict[str, bytes] = {}
    for source in sources:
        pattern = posixpath.normpath(source.lstrip("/") or ".")
        below = "" if pattern == "." else f"{pattern}/"
        inside = {path: path.removeprefix(below) for path in context if path.startswith(below)}
        single = {path: posixpath.basename(path) for path in context if fnmatch.fnmatchcase(path, pattern)}
        if not inside and not single:
            raise EpisodeError(f"its Dockerfile copies {source}, which is not beside it")
        as_folder = bool(inside) or len(sources) > 1 or len(single) > 1 or target.endswith("/") or into_folder
        for path, name in (inside or single).items():
            files[posixpath.join(target, name) if as_folder else target] = context[path]
    return files


def _permit(root: Path) -> None:
    """Make all folders removable: a command may have taken their rights."""
    for folder, names, _ in os.walk(root, onerror=lambda error: None):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
