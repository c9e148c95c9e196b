"""Commands in a sandbox: their limits, and what they cannot reach. The contract is in tests/contracts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from rlhf_core.config.environments.runtimes import SandboxRuntime
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.processes import command_process
from rlhf_core.runtimes.base import Image, Ran, Runtime
from rlhf_core.runtimes.sandbox import SandboxedFiles, Sandboxes

pytestmark = pytest.mark.parts

T = TypeVar("T")
SECRET = "the-token-of-the-job"


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_TOKEN", SECRET)
        sandboxes = Sandboxes(SandboxRuntime(memory_gib=0.25, disk_gib=0.02, processes=32))
    yield sandboxes
    assert not list(sandboxes._folder.iterdir()), "a stopped runtime leaves no files"
    sandboxes.close()


def used(sandboxes: Sandboxes, use: Callable[[Runtime], Awaitable[T]], image: Image | None = None) -> T:
    async def play() -> T:
        runtime = await sandboxes.start(image or Image())
        try:
            return await use(runtime)
        finally:
            runtime.stop()

    return asyncio.run(play())


def ran(sandboxes: Sandboxes, command: str, seconds: float = 20.0) -> Ran:
    return used(sandboxes, lambda runtime: runtime.run(command, seconds))


HOSTILE = {
    "reads the node's files": ("cat /etc/shadow", "No such file or directory"),
    "lists the node's folders": (f"ls {Path(__file__).parent}", "No such file or directory"),
    "reads the job's variables": ("grep -l TOKEN /proc/*/environ; echo none", "none"),
    "writes to the system": ("touch /usr/bin/own", "Read-only file system"),
    "writes the kernel's settings": ("echo 1 > /proc/sys/vm/swappiness", "Read-only file system"),
    "kills all": ("kill -9 -1; kill -9 1; echo alive", "alive"),
    "mounts": ("mount -t tmpfs x /tmp; echo $?", "32"),
    "makes a namespace": ("unshare -U true", "Operation not permitted"),
    "makes a device": ("mknod here b 8 0", "Operation not permitted"),
    "becomes another user": ("python3 -c 'import os; os.setuid(1)'", "Invalid argument"),
    "traces": ("python3 -c 'import ctypes; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0))'", "-1"),
    "opens a raw socket": ("python3 -c 'import socket; socket.socket(17, 3)'", "Operation not permitted"),
    "sends a packet": ("echo x > /dev/udp/8.8.8.8/53", "Network is unreachable"),
    "makes files in memory": ("python3 -c 'import os; os.memfd_create(\"a\")'", "Operation not permitted"),
    "raises its limits": ("ulimit -n 100000", "cannot modify limit"),
    "leaves its root": ("cd ../../../../..; pwd; chroot / true", "Operation not permitted"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_command_cannot_reach(sandboxes: Sandboxes, what: str) -> None:
    command, expected = HOSTILE[what]
    result = ran(sandboxes, command)
    assert expected in result.output.splitlines()[-1]
    assert SECRET not in result.output
    assert not result.stopped


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("python3 -c 'x = [bytearray(2**20) for _ in range(99)]; __import__(\"time\").sleep(9)' & "
         "python3 -c 'x = [bytearray(2**20) for _ in range(200)]; __import__(\"time\").sleep(9)'", "memory"),
        ("for i in 1 2 3 4; do head -c 9000000 /dev/zero > $i; done; sleep 9", "files"),
        ("mkdir x; for i in {1..11000}; do : > x/$i; done", "files"),
        ("sleep 9", "time"),
    ],
)  # fmt: skip
def test_a_limit_ends_a_command(sandboxes: Sandboxes, command: str, limit: str) -> None:
    assert ran(sandboxes, command, 3.0 if limit == "time" else 60.0).stopped == limit


def test_the_kernel_limits_the_processes_of_a_command(sandboxes: Sandboxes) -> None:
    """At most 32 of 40: nothing that starts more of them is run in a test."""
    forks = """
import os, time
try:
    for count in range(40):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
except OSError as error:
    print(count < 32, error)
"""
    assert ran(sandboxes, f"python3 -c '{forks}'").output == "True [Errno 11] Resource temporarily unavailable\n"


def test_the_kernel_limits_the_memory_of_a_process(sandboxes: Sandboxes) -> None:
    assert ran(sandboxes, "python3 -c 'bytearray(2**29)' 2>&1 | tail -n 1").output == "MemoryError\n"


def test_what_commands_may_do(sandboxes: Sandboxes) -> None:
    serves = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    for command, expected in (
        ("id -u; hostname; pwd", "0\nsandbox\n/app\n"),
        ("cat < <(echo substituted)", "substituted\n"),
        ("timeout 0.2 sleep 9; echo $?", "124\n"),
        (f'python3 -c "{serves}"; echo $?', "0\n"),
        ("echo $TZ $HOME", "UTC /root\n"),
    ):
        assert ran(sandboxes, command).output.startswith(expected)


def test_a_link_leads_to_no_file_of_the_node(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (outside := tmp_path / "outside").write_text("of the node")

    async def use(runtime: Runtime) -> None:
        links = f"ln -s {outside} file; ln -s {tmp_path} folder; ln -s /proc/self/root/etc own; ln -s /app/in there"
        await runtime.run(f"{links}; echo inside > /app/in", 20.0)
        assert [await runtime.read(path) for path in ("file", "folder/outside", "own/passwd")] == [None] * 3
        assert await runtime.read("there") == b"inside\n", "a link inside is followed"
        await runtime.write({"file": b"replaced"})
        assert await runtime.read("file") == b"replaced", "the link, and not what it names"
        with pytest.raises(EpisodeError, match="a file cannot be written into its sandbox"):
            await runtime.write({"there/below": b""})

    used(sandboxes, use)
    assert outside.read_text() == "of the node"
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


def test_a_file_that_is_too_large_is_an_error(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.runtimes.sandbox.MOST_READ", 1000)

    async def use(runtime: Runtime) -> None:
        await runtime.run("head -c 1001 /dev/zero > large", 20.0)
        with pytest.raises(EpisodeError, match="large has more than"):
            await runtime.read("large")

    used(sandboxes, use)


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /app /tests /logs /etc /root /dev /bin /sbin /lib /lib64 2> /dev/null",
        "rm /bin; ln -s /tmp /bin; rm -rf /etc; ln -s / /etc; mv /dev /x",
        "mkdir -p a/b; chmod 000 a/b a",
        "rm -rf /app /tmp; echo x > /x",
    ],
)
def test_a_sandbox_that_is_destroyed_harms_nothing_else(sandboxes: Sandboxes, command: str) -> None:
    """And it can be removed: the fixture looks for what is left."""

    async def use(runtime: Runtime) -> Ran:
        await runtime.run(command, 20.0)
        return await runtime.run("pwd", 20.0)

    assert used(sandboxes, use).output.endswith("/app\n")
    assert ran(sandboxes, "echo fine").output == "fine\n"


def test_the_steps_of_a_dockerfile_are_followed(sandboxes: Sandboxes) -> None:
    dockerfile = (
        b"FROM debian:13\n# a comment\nWORKDIR /opt/here\nENV NAME=value\nCOPY data/ ./data/\n"
        b'COPY one.txt *.csv /srv/\nCOPY one.txt renamed.txt\nCOPY ["one.txt", "/srv"]\n'
        b"RUN echo $NAME > made \\\n && chmod 600 made\n"
    )
    context = {"Dockerfile": dockerfile, "one.txt": b"1", "data/a": b"a", "data/deep/b": b"b", "t.csv": b"c"}

    async def use(runtime: Runtime) -> str:
        return (await runtime.run("pwd; echo $NAME; cat made renamed.txt; find . /srv -type f | sort", 20.0)).output

    expected = "/opt/here\nvalue\nvalue\n1./data/a\n./data/deep/b\n./made\n./renamed.txt\n/srv/one.txt\n/srv/t.csv\n"
    assert used(sandboxes, use, Image(context=context)) == expected


@pytest.mark.parametrize(
    ("image", "error", "text"),
    [
        (Image(name="debian:13"), StageError, "the image debian:13 needs the runtime `container` or `remote`"),
        (Image(context={"Dockerfile": b"FROM a\nUSER x"}), StageError, "`USER x` of the Dockerfile needs an image"),
        (Image(context={"Dockerfile": b"COPY a b"}), EpisodeError, "its Dockerfile copies a, which is not beside it"),
        (Image(context={"Dockerfile": b"RUN echo no; exit 4"}), EpisodeError, r"failed \(status 4\): no"),
    ],
)  # fmt: skip
def test_an_image_that_a_sandbox_cannot_have(
    sandboxes: Sandboxes, image: Image, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        asyncio.run(sandboxes.start(image))


def test_commands_end_with_the_host_and_it_is_started_again(tmp_path: Path) -> None:
    """A host that is killed, as for want of memory: the kernel kills its keepers, and the namespaces with them."""
    sandboxes = Sandboxes(SandboxRuntime())
    runtime = asyncio.run(sandboxes.start(Image()))
    assert isinstance(runtime, SandboxedFiles)
    failed: list[str] = []

    def run() -> None:
        with pytest.raises(EpisodeError, match="the process that runs its command has ended") as error:
            asyncio.run(runtime.run("(setsid sleep 1000 &); touch begun; sleep 1000", 1000.0))
        failed.append(str(error.value))

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 20
    while not (runtime._root / "app" / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    host = psutil.Process(sandboxes._host._host.process.pid)
    running = host.children(recursive=True)
    assert len(running) >= 4, "a keeper, the first process, and two programs"
    host.kill()
    thread.join(20)
    assert len(failed) == 1
    psutil.wait_procs(running, timeout=10)
    assert not any(process.is_running() for process in running)
    assert asyncio.run(runtime.run("ls", 20.0)).output == "begun\n"
    sandboxes.close()
    assert not runtime._root.exists()


@pytest.mark.parametrize(
    ("without", "fault"),
    [("set_filter", "it could make a namespace"), ("leave_user", "PermissionError: unshare: Operation not permitted")],
)
def test_a_node_that_cannot_confine_commands_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without: str, fault: str
) -> None:
    """A kernel that filters no calls, or permits no namespaces, played by a program that does not ask for them."""
    program = Path(command_process.__file__).read_text()
    (line,) = [line for line in program.splitlines(keepends=True) if line.startswith(f"    {without}(")]
    instead = "" if without == "set_filter" else '    raise PermissionError("unshare: Operation not permitted")\n'
    (copy := tmp_path / "command_process.py").write_text(program.replace(line, instead))
    monkeypatch.setattr(command_process, "__file__", str(copy))
    with pytest.raises(StageError, match=rf"this node cannot run commands confined \(({fault})"):
        Sandboxes(SandboxRuntime())
