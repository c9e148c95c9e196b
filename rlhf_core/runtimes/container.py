"""Runtimes in containers of this node, by the command line of docker or podman.

A container's first process reads from this process: a container ends with it, however it ends. It is a bash, which
reaps what commands have left: zombies count towards the limit of processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.environments.runtimes import ContainerRuntime
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.runtimes.base import MOST_OUTPUT, MOST_READ, Image, Ran, Runtime, RuntimeHost
from rlhf_core.system.scratch import scratch_folder

_LABEL = "alignment.host"
_SECONDS = 60.0  # of what takes no time by itself: to write, to read, to kill
_PAUSE = 0.2  # between two looks for a container that starts
_MISSING = 66  # exit status of _READ for what is no file
_MOST_COMMAND = 2**17 - 1  # characters: Linux passes no longer argument
_KILL = "kill -KILL -1"  # every process but the container's first, and the shell itself
_READ = 'test -f "$1" || exit 66; head -c "$2" -- "$1"'
_WRITE = (
    'while [ $# -gt 0 ]; do mkdir -p -- "$(dirname -- "$1")" && rm -f -- "$1" && head -c "$2" > "$1" '
    '&& chmod 755 -- "$1" || exit 1; shift 2; done'
)


@dataclass(frozen=True, slots=True)
class _Output:
    """The result of a command line."""

    content: bytes
    errors: bytes
    status: int
    cut: bool  # there was more content


class Containers(RuntimeHost):
    name = "container"

    @classmethod
    def of(cls, config: ContainerRuntime) -> Containers:
        return cls(config)

    def __init__(self, config: ContainerRuntime) -> None:
        """Raises StageError if containers cannot be started on this node."""
        self._config = config
        self._label = f"{_LABEL}={secrets.token_hex(8)}"
        self._built: dict[str, asyncio.Lock] = {}
        self._tags: set[str] = set()
        self._removals = ThreadPoolExecutor(8)
        if shutil.which(config.program) is None:
            raise StageError(f"the runtime `container` needs `{config.program}`, which this node does not have")
        looked = subprocess.run([config.program, "ps", "-q"], capture_output=True, check=False, timeout=_SECONDS)
        if looked.returncode:
            raise StageError(
                f"`{config.program} ps` failed on this node, so no container can be started: {_shown(looked.stderr)}"
            )

    async def start(self, image: Image) -> Runtime:
        deadline = time.monotonic() + self._config.start_seconds
        name = await self._image(image)
        container = f"alignment-{secrets.token_hex(8)}"
        variables = [part for pair in image.variables.items() for part in ("--env", "=".join(pair))]
        limits = [
            "--memory", f"{int(self._config.memory_gib * 2**30)}b", "--pids-limit", str(self._config.processes),
            "--security-opt", "no-new-privileges", *([] if self._config.network else ["--network", "none"]),
        ]  # fmt: skip
        line = [
            self._config.program, "run", "--rm", "--interactive", "--name", container, "--label", self._label,
            *limits, *variables, "--entrypoint", "bash", name, "-c", "read -r _",
        ]  # fmt: skip
        process = await asyncio.to_thread(_begun, line)
        runtime = Container(self._config.program, container, process, self._removals)
        try:
            await runtime.wait(deadline)
        except BaseException:
            runtime.stop()
            raise
        return runtime

    async def _image(self, image: Image) -> str:
        """Return the image's name, after it is built if it must be."""
        if not image.builds:
            name = image.name or self._config.image
            if name is None:
                raise StageError("neither the task nor the runtime `container` names an image: set `image`")
            return name
        digest = hashlib.sha256()
        for path, content in sorted(image.context.items()):
            digest.update(f"{len(path)} {path} {len(content)} ".encode() + content)
        tag = f"alignment-task:{digest.hexdigest()[:24]}"
        async with self._built.setdefault(tag, asyncio.Lock()):
            if tag not in self._tags:
                await self._build(tag, image.context)
                self._tags.add(tag)
        return tag

    async def _build(self, tag: str, context: Mapping[str, bytes]) -> None:
        with scratch_folder("image") as folder:
            for path, content in context.items():
                (file := folder / path).parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
                file.chmod(0o755)
            line = [self._config.program, "build", "--quiet", "--tag", tag, str(folder)]
            try:
                built = await _done(line, self._config.start_seconds)
            except TimeoutError as error:
                raise EpisodeError(f"its image was not built within {self._config.start_seconds:g} s") from error
        if built.status:
            raise EpisodeError(f"its image cannot be built: {_shown(built.errors)}")

    def close(self) -> None:
        """Remove all containers, also those whose removal has failed."""
        self._removals.shutdown()
        program = self._config.program
        listing = [program, "ps", "--all", "--quiet", "--filter", f"label={self._label}"]
        left = subprocess.run(listing, capture_output=True, check=False, timeout=_SECONDS).stdout.decode().split()
        if left:
            subprocess.run([program, "rm", "--force", *left], capture_output=True, check=False, timeout=_SECONDS)


class Container(Runtime):
    def __init__(
        self, program: str, name: str, process: tuple[subprocess.Popen[bytes], Path], removals: ThreadPoolExecutor
    ) -> None:
        """process: the command line that has started it, and lives as long; and the file of its errors. removals:
        threads that remove containers.
        """
        self._program, self._name, self._removals = program, name, removals
        self._stopped = False
        self._process, self._errors = process

    async def wait(self, deadline: float) -> None:
        """Wait until commands can be run. Raises EpisodeError if it does not start."""
        while (await self._execute(["true"], _SECONDS)).status:
            if self._process.poll() is not None:
                raise EpisodeError(f"its container has not started: {_shown(self._errors.read_bytes())}")
            if time.monotonic() > deadline:
                raise EpisodeError("its container has not started in time")
            await asyncio.sleep(_PAUSE)

    async def write(self, files: Mapping[str, bytes]) -> None:
        sizes = [part for path, content in files.items() for part in (path, str(len(content)))]
        written = await self._execute(["bash", "-c", _WRITE, "bash", *sizes], _SECONDS, b"".join(files.values()))
        if written.status:
            raise EpisodeError(f"a file cannot be written into its container: {_shown(written.errors)}")

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        if len(command) > _MOST_COMMAND or "\0" in command:
            return Ran(f"bash: a command has at most {_MOST_COMMAND} characters, none of them NUL\n", 126)
        given = [part for pair in (variables or {}).items() for part in ("--env", "=".join(pair))]
        line = [self._program, "exec", *given, self._name, "bash", "-c", f"exec 2>&1\n{command}"]
        try:
            ran = await _done(line, seconds, most=MOST_OUTPUT)
        except TimeoutError as error:
            await self._kill()
            (printed,) = error.args
            return Ran(printed.decode(errors="replace"), 137, "time")
        await self._kill()
        if self._process.poll() is not None:
            raise EpisodeError(f"its container has ended: {_shown(self._errors.read_bytes())}")
        output = (ran.content + ran.errors)[:MOST_OUTPUT]
        return Ran(output.decode(errors="replace"), ran.status, cut=ran.cut)

    async def read(self, path: str) -> bytes | None:
        line = ["bash", "-c", _READ, "bash", path, str(MOST_READ + 1)]
        read = await self._execute(line, _SECONDS, most=MOST_READ + 1)
        if read.status == _MISSING:
            return None
        if read.status:
            raise EpisodeError(f"{path} cannot be read: {_shown(read.errors)}")
        if len(read.content) > MOST_READ:
            raise EpisodeError(f"{path} has more than {MOST_READ // 2**20} MiB")
        return read.content

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._removals.submit(self._remove)

    def _remove(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # its first process ends, and the container with it
        removal = [self._program, "rm", "--force", self._name]
        subprocess.run(removal, capture_output=True, check=False, timeout=_SECONDS)
        self._process.kill()
        self._process.wait()
        self._errors.unlink(missing_ok=True)

    async def _kill(self) -> None:
        """Kill all processes that a command has left."""
        await self._execute(["bash", "-c", _KILL], _SECONDS)

    async def _execute(
        self, line: Sequence[str], seconds: float, given: bytes | None = None, most: int = MOST_OUTPUT
    ) -> _Output:
        interactive = [] if given is None else ["--interactive"]
        try:
            return await _done([self._program, "exec", *interactive, self._name, *line], seconds, given, most)
        except TimeoutError as error:
            raise EpisodeError(f"`{self._program} exec` did not end within {seconds:g} s") from error


def _begun(line: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
    with tempfile.NamedTemporaryFile(prefix="alignment-container-", delete=False) as errors:
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors)
    return process, Path(errors.name)


async def _done(line: Sequence[str], seconds: float, given: bytes | None = None, most: int = MOST_OUTPUT) -> _Output:
    """Run a command line. most: bytes of its output that are kept. Raises TimeoutError with the output so far."""
    process = await asyncio.create_subprocess_exec(
        *line,
        stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = [bytearray(), bytearray()]
    sizes = [0, 0]

    async def keep(stream: asyncio.StreamReader, number: int) -> None:
        while printed := await stream.read(1 << 16):
            outputs[number] += printed[: most - len(outputs[number])]
            sizes[number] += len(printed)

    async def give() -> None:
        if process.stdin is not None:
            with suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(given or b"")
                await process.stdin.drain()
            process.stdin.close()

    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(give(), keep(process.stdout, 0), keep(process.stderr, 1))
            status = await process.wait()
    except TimeoutError as error:
        raise TimeoutError(bytes(outputs[0])) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _Output(bytes(outputs[0]), bytes(outputs[1]), status, sizes[0] > most)


def _shown(errors: bytes) -> str:
    return " ".join(errors.decode(errors="replace").split())[-300:] or "it said nothing"
