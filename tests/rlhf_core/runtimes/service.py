"""Two programs in front of a sandbox: a service with the protocol of remote runtimes, and a `docker` that is none."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlhf_core.config.environments.runtimes import SandboxRuntime
from rlhf_core.errors import EpisodeError
from rlhf_core.runtimes.base import MOST_OUTPUT, MOST_READ, Image, Runtime
from rlhf_core.runtimes.sandbox import Sandboxes

DOCKER = Path(__file__).with_name("docker.py")


class Service:
    """The remote protocol. `answers` replace those of a path's last part, such as `run`."""

    def __init__(self) -> None:
        self.sandboxes = Sandboxes(SandboxRuntime())
        self.runtimes: dict[str, Runtime] = {}
        self.answers: dict[str, web.Response] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[str | None] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        _, _, identity, action = (*request.path.split("/"), "", "")[:4]
        self.asked.append((action or request.method, body))
        self.headers.append(request.headers.get("Authorization"))
        if (given := self.answers.get(action or request.method)) is not None:
            return web.Response(body=given.body, status=given.status, content_type="application/json")
        try:
            return web.json_response(await self._done(request.method, identity, action, body))
        except EpisodeError as error:
            return web.json_response({"error": str(error)}, status=500)

    async def _done(self, method: str, identity: str, action: str, body: dict[str, Any]) -> Any:
        if not identity:
            context = {path: base64.b64decode(content) for path, content in body["context"].items()}
            identity = f"r{len(self.runtimes)}"
            self.runtimes[identity] = await self.sandboxes.start(Image(body["image"], context, body["variables"]))
            return {"runtime": identity}
        runtime = self.runtimes[identity]
        match method, action:
            case "DELETE", _:
                runtime.stop()
                return {}
            case _, "write":
                await runtime.write({path: base64.b64decode(content) for path, content in body["files"].items()})
                return {}
            case _, "run":
                ran = await runtime.run(body["command"], body["seconds"], body["variables"])
                return {"output": ran.output, "status": ran.status, "stopped": ran.stopped, "cut": ran.cut}
            case _, "read":
                content = await runtime.read(body["path"])
                return {"content": None if content is None else base64.b64encode(content).decode()}
        raise AssertionError(action)


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serve in a thread; yield the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", service.answer)
        await (runner := web.AppRunner(app, shutdown_timeout=1.0)).setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        assert site._server is not None
        return runner, site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        service.sandboxes.close()


class Docker:
    """The daemon of `docker.py`: each container is a sandbox. A container's processes are never the machine's own."""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:  # docker cuts no output
            patch.setattr("rlhf_core.runtimes.sandbox.MOST_OUTPUT", 2 * MOST_OUTPUT)
            self.sandboxes = Sandboxes(SandboxRuntime())
        self.containers: dict[str, Runtime] = {}
        self.lines: list[list[str]] = []
        self.contexts: list[dict[str, str]] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        line = asked["line"]
        self.lines.append(line)
        work = asyncio.ensure_future(self._done(line, base64.b64decode(asked["input"]), reader))
        gone = asyncio.ensure_future(reader.read(1)) if line[0] != "run" else None
        waited: list[asyncio.Future[Any]] = [work] if gone is None else [work, gone]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            output, status = work.result()
            writer.write(json.dumps({"output": base64.b64encode(output).decode(), "status": status}).encode() + b"\n")
            await writer.drain()
        work.cancel()
        if gone is not None:
            gone.cancel()
        writer.close()

    async def _done(self, line: list[str], given: bytes, reader: asyncio.StreamReader) -> tuple[bytes, int]:
        match line:
            case ["ps", *_]:
                return b"", 0
            case ["build", "--quiet", "--tag", _, folder]:
                files = [path for path in Path(folder).rglob("*") if path.is_file()]
                self.contexts.append({path.relative_to(folder).as_posix(): path.read_text() for path in files})
                return b"sha256:1\n", 0
            case ["rm", "--force", name]:
                if name in self.containers:
                    self.containers.pop(name).stop()
                return b"", 0
            case ["run", *options]:
                if "missing" in options:
                    return b"Unable to find image 'missing'", 125
                name = options[options.index("--name") + 1]
                given_variables = [options[at + 1] for at, option in enumerate(options) if option == "--env"]
                variables = dict(pair.split("=", 1) for pair in given_variables)
                self.containers[name] = await self.sandboxes.start(Image(variables=variables))
                await reader.read()  # until its standard input is closed
                return b"", 0
            case ["exec", *options]:
                return await self._executed(options, given)
        raise AssertionError(line)

    async def _executed(self, options: list[str], given: bytes) -> tuple[bytes, int]:
        variables: dict[str, str] = {}
        while options[0].startswith("--"):
            if options.pop(0) == "--env":
                name, _, value = options.pop(0).partition("=")
                variables[name] = value
        container, *command = options
        if container not in self.containers:
            return f"No such container: {container}".encode(), 1
        runtime = self.containers[container]
        if command[:2] == ["bash", "-c"] and command[2].startswith("test -f"):  # more than a command's output
            content = await runtime.read(command[4])
            return (b"", 66) if content is None else (content[: MOST_READ + 1], 0)
        await runtime.write({"/dev/shm/input": given})
        ran = await runtime.run(f"{shlex.join(command)} < /dev/shm/input", 1000.0, variables)
        return ran.output.encode(errors="replace"), ran.status


@contextmanager
def docker_in(folder: Path, docker: Docker) -> Iterator[None]:
    """Put a program `docker` into the folder, and answer it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    socket = folder / "socket"
    starting = asyncio.start_unix_server(docker.answer, socket, limit=2**27)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result(20)
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nexec python3 {shlex.quote(str(DOCKER))} {shlex.quote(str(socket))} "$@"\n')
    program.chmod(0o755)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        docker.sandboxes.close()
