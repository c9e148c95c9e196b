"""Code of the Python tool: what it computes comes back, and what it must not do it cannot do."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_core.config.environments.tools import PythonTool
from rlhf_core.environments.tools.python_tool import PythonTools
from rlhf_core.errors import EpisodeError, StageError
from rlhf_core.processes import sandbox_process, seccomp
from rlhf_core.processes.sandbox import Sandbox

pytestmark = pytest.mark.parts

SECRET = "the-token-of-the-job"


@pytest.fixture(scope="module")
def tools() -> Iterator[PythonTools]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_TOKEN", SECRET)
        tools = PythonTools(PythonTool(type="python", timeout_seconds=2.0, memory_gib=0.25))
    yield tools
    tools.close()


def result(tools: PythonTools, code: str) -> tuple[str, str | None]:
    """The text that the policy gets, and what is counted."""
    made = asyncio.run(tools.new().call("python", {"code": code}))
    return made.text, made.problem


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("27*46", "1242"),
        ("x = 3\nprint('x is', x)\nx + 1", "x is 3\n4"),
        ("x = 3", "[no output]"),
        ("import math\nmath.comb(10, 3)", "120"),
        ("with open('a', 'w') as f:\n    f.write('own')\nopen('a').read()", "'own'"),
        ("import os\nos.listdir()", "[]"),
        ("exit()", "[no output]"),
        ("import sqlite3\nc = sqlite3.connect('a')\nc.execute('create table t (x)')\nc.commit()", "[no output]"),
        ("import os\nos.makedirs('a/b')\nos.dup(os.open('a/c', os.O_CREAT | os.O_WRONLY)) > 2", "True"),
        (
            "import tempfile\nwith tempfile.TemporaryDirectory(dir='.') as t:\n    open(t + '/a', 'w').close()",
            "[no output]",
        ),
    ],
)
def test_what_code_prints_and_its_last_value_come_back(tools: PythonTools, code: str, text: str) -> None:
    assert result(tools, code) == (text, None)


def test_random_numbers_repeat(tools: PythonTools) -> None:
    first, again = (result(tools, "import random\nrandom.random()") for _ in range(2))
    assert first == again


def test_a_traceback_shows_the_code_alone(tools: PythonTools) -> None:
    text, problem = result(tools, "def f(x):\n    return 1 / x\nf(0)")
    assert problem == "tool_errors"
    assert text.startswith('Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n    f(0)\n')
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "sandbox" not in text


NESTED = "import os, time\nfor _ in range({count}):\n    os.mkdir({name})\n    os.chdir({name})\ntime.sleep(9)"
HOSTILE = {
    "reads /etc/passwd": ("open('/etc/passwd').read()", "PermissionError"),
    "lists a folder": ("import os\nos.listdir('/')", "PermissionError"),
    "reads another process": ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "PermissionError"),
    "TCP": ("import socket\nsocket.create_connection(('127.0.0.1', PORT))", "PermissionError"),
    "UDP": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "PermissionError"),
    "UNIX": ("import socket\nsocket.socket(socket.AF_UNIX)", "PermissionError"),
    "forks without end": ("import os\nwhile True:\n    os.fork()", "PermissionError"),
    "starts a program": ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
    "starts threads": ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
    "grows": ("x = []\nwhile True:\n    x.append(bytearray(2**24))", "MemoryError"),
    "grows in shared memory": ("import mmap\nmmap.mmap(-1, 2**34)", "Cannot allocate memory"),
    "makes files in memory": ("import os\nos.memfd_create('a')", "PermissionError"),
    "prints without end": ("while True:\n    print('x' * 1000)", "[stopped: it printed more than 64 KiB]"),
    "sleeps for ever": ("import time\nprint('so far')\ntime.sleep(1000)", "so far\n[stopped: it ran longer than 2 s]"),
    "computes for ever": ("9**9**9", "[stopped: it ran longer than 2 s]"),
    "writes outside": ("open('/tmp/of-the-tool', 'w')", "PermissionError"),
    "writes beside its folder": ("open('../of-the-tool', 'w')", "PermissionError"),
    "changes rights": ("import os\nos.chmod('/etc/passwd', 0o777)", "PermissionError"),
    "fills the disk": ("i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(2**20))\n    i += 1", "it wrote more"),
    "writes many files": ("i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1", "or 1000 files, or"),
    "hides a folder": ("import os\nos.mkdir('x', 0)", "PermissionError"),
    "hides folders": ("import os\nos.umask(0o777)", "OSError"),
    "nests long names": (NESTED.format(count=40, name="'x' * 250"), "or too deep folders]"),
    "nests without end": (NESTED.format(count=10**6, name="'x'"), "or too deep folders]"),
    "makes a set-uid file": ("import os\nos.open('x', os.O_CREAT, 0o4755)", "PermissionError"),
    "makes a set-gid file": ("import os\nos.open('.', os.O_TMPFILE | os.O_RDWR, 0o2755)", "PermissionError"),
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "kills all": ("import os\nos.kill(-1, 9)", "PermissionError"),
    "raises its limits": ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))", "not allowed to raise"),
    "traces its parent": ("import ctypes, os\nctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == -1", "True"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "[stopped: its process was ended by signal 11]"),
    "closes its output and runs on": ("import os, time\nos.closerange(0, 9)\ntime.sleep(1000)", "ended by signal 9]"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_code_ends_as_documented_and_touches_no_other(tools: PythonTools, what: str) -> None:
    code, expected = HOSTILE[what]
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = code.replace("PORT", str(server.getsockname()[1]))

        async def together() -> list[str]:
            codes = ("1 + 1", code, "import time\ntime.sleep(0.2)\n2 + 2")
            return [
                made.text for made in await asyncio.gather(*(tools.new().call("python", {"code": c}) for c in codes))
            ]

        before, hostile, after = asyncio.run(together())
    assert (before, after) == ("2", "4")
    assert hostile.endswith(expected) or expected in hostile.splitlines()[-1]
    assert not os.path.exists("/tmp/of-the-tool")
    assert not list(tools._sandbox._host.folder.iterdir())


@pytest.mark.parametrize(
    "attempt",
    [
        "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())", "fcntl.fcntl(1, 15, struct.pack('ii', 1, os.getppid()))",
        "fcntl.fcntl(1, fcntl.F_SETSIG, 9)", "fcntl.fcntl(1, fcntl.F_SETFL, os.O_ASYNC)",
        "fcntl.fcntl(1, fcntl.F_SETLEASE, fcntl.F_RDLCK)", "fcntl.fcntl(os.open('.', 0), fcntl.F_NOTIFY, 1)",
        "fcntl.fcntl(1, fcntl.F_GETLK, bytes(32))", "fcntl.ioctl(1, 0x5452, bytes(4))",
        "fcntl.ioctl(1, 0x8901, struct.pack('i', os.getppid()))", "fcntl.ioctl(1, 0x8902, struct.pack('i', 1))",
        "signal.setitimer(signal.ITIMER_REAL, 1)",
    ],
)  # fmt: skip
def test_code_cannot_have_the_kernel_send_a_signal(tools: PythonTools, attempt: str) -> None:
    text, _ = result(tools, f"import fcntl, os, signal, struct\n{attempt}")
    assert "Operation not permitted" in text


def test_code_may_set_the_flags_of_a_file_that_send_nothing(tools: PythonTools) -> None:
    code = "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND)\nfcntl.fcntl(1, fcntl.F_GETFL) & os.O_APPEND"
    assert result(tools, code) == (str(os.O_APPEND), None)


def test_no_call_sees_the_code_or_the_output_of_another(tools: PythonTools) -> None:
    """Of calls that ran before, that run, and that wait for their turn."""
    secret = f"import time\nprint('{SECRET}', flush=True)\ntime.sleep(1)"
    search = f"""
import gc
mark = {SECRET[::-1]!r}[::-1]
found, seen, pending = [], set(), gc.get_objects()
while pending:
    value = pending.pop()
    if id(value) in seen or value is mark:
        continue
    seen.add(id(value))
    if mark in (value if isinstance(value, str) else str(value) if isinstance(value, (bytes, bytearray)) else ''):
        found.append(value)
    if len(seen) < 10**6:
        pending += gc.get_referents(value)
found"""

    async def together() -> str:
        busy = [asyncio.create_task(tools.new().call("python", {"code": secret})) for _ in range(2)]
        await asyncio.sleep(0.3)
        busy += [asyncio.create_task(tools.new().call("python", {"code": secret})) for _ in range(2)]
        made = await tools.new().call("python", {"code": search})
        assert {call.text for call in await asyncio.gather(*busy)} == {SECRET}
        return made.text

    assert result(tools, "print(1)") == ("1", None)
    assert asyncio.run(together()) == "[]"


def test_the_environment_has_none_of_the_jobs_variables(tools: PythonTools) -> None:
    text, problem = result(tools, "import os\ndict(os.environ)")
    assert problem is None
    assert "A_TOKEN" not in text
    assert "PATH" not in text


def test_nothing_is_left_of_a_call_or_of_the_sandbox() -> None:
    box = Sandbox(60.0, 0.25)
    folder = box._host.folder
    thread = threading.Thread(target=run_for_ever, args=(box,))
    thread.start()
    deadline = time.monotonic() + 20
    while len(running := psutil.Process(box._host._host.process.pid).children(recursive=True)) < 2:  # keeper, code
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert asyncio.run(box.run("open('left', 'w').close()")).status == 0
    assert len(list(folder.iterdir())) == 1, "that of the code that runs"
    box.close()
    thread.join(20)
    assert not thread.is_alive()
    psutil.wait_procs(running, timeout=10)
    assert not any(process.is_running() for process in running)
    assert not folder.exists()


def test_a_host_that_has_died_is_started_again() -> None:
    box = Sandbox(60.0, 0.25)
    host = psutil.Process(box._host._host.process.pid)
    thread = threading.Thread(target=run_for_ever, args=(box,))
    thread.start()
    deadline = time.monotonic() + 20
    while len(running := host.children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    host.kill()
    thread.join(20)
    assert not thread.is_alive()
    psutil.wait_procs(running, timeout=10)
    assert not any(process.is_running() for process in running), "the code that ran has ended with it"

    async def together() -> list[str]:
        return [ran.output for ran in await asyncio.gather(*(box.run(f"{number}") for number in range(3)))]

    assert asyncio.run(together()) == ["0\n", "1\n", "2\n"]
    assert not list(box._host.folder.iterdir())
    box.close()


def test_the_failure_of_a_call_is_that_calls() -> None:
    """Its keeper, a fork of the host, is killed."""
    box = Sandbox(60.0, 0.25)
    thread = threading.Thread(target=run_for_ever, args=(box,))
    thread.start()
    deadline = time.monotonic() + 20
    while not (keepers := psutil.Process(box._host._host.process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first = box._host._host
    keepers[0].kill()
    thread.join(20)
    assert asyncio.run(box.run("1")).output == "1\n"
    assert box._host._host is first
    box.close()


def run_for_ever(box: Sandbox) -> None:
    with pytest.raises(EpisodeError, match="the process that runs the policy's code has ended"):
        asyncio.run(box.run("while True: pass"))


@pytest.mark.parametrize(("without", "could"), [("_restrict_files", "read a file"), ("set_filter", "open a socket")])
def test_a_node_that_cannot_confine_code_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without: str, could: str
) -> None:
    """A kernel without Landlock or seccomp, played by a program that does not ask for it."""
    program = Path(sandbox_process.__file__).read_text()
    (line,) = [line for line in program.splitlines(keepends=True) if line.startswith(f"    {without}(")]
    program = program.replace(line, "")
    (copy := tmp_path / "sandbox_process.py").write_text(program)
    monkeypatch.setattr("rlhf_core.processes.sandbox._PROGRAM", copy)
    with pytest.raises(StageError, match=rf"cannot run the policy's code confined \(it could {could}"):
        Sandbox(5.0, 0.25)


def test_a_node_that_lets_code_send_signals_by_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.12 Landlock does not keep such a signal from other processes."""
    monkeypatch.setitem(seccomp._ALLOWED, "fcntl", seccomp._FCNTL)
    with pytest.raises(StageError, match="it could have the kernel send a signal"):
        Sandbox(5.0, 0.25)


def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(StageError, match="ModuleNotFoundError: No module named 'sympi'"):
        Sandbox(5.0, 0.25, ["sympi"])
