"""A program run by the warm Python looks like the same program run by a fresh one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_core.warm import client

pytestmark = pytest.mark.parts

ROOT = Path(__file__).resolve().parents[3]
SHOWN = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get('GREETING'), 'numpy' in sys.modules)\n"


class Warm:
    """A warm process that has imported numpy and one module of ours alone. root: where it finds our code."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        self.socket = folder / "warm.sock"
        self.environment = {**os.environ, client.SOCKET_VARIABLE: str(self.socket), "PYTHONPATH": str(root)}
        command = [
            sys.executable,
            "-m",
            "rlhf_core.warm.server",
            str(self.socket),
            "numpy",
            "rlhf_core.errors",
        ]
        self.log = folder / "warm.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=root, env=self.environment, stdout=log)
        while not self.socket.exists():
            assert self.process.poll() is None
            time.sleep(0.02)

    def start(self, code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        (script := self.folder / "program.py").write_text(code)
        command = [sys.executable, "-IS", client.__file__, str(script), *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env={**self.environment, **environment},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, code: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(code, *arguments, **environment)
        output, error = process.communicate(timeout=60)
        return process.returncode, output, error

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_sleeper(self, before: str = "") -> tuple[subprocess.Popen[str], psutil.Process]:
        """The client, and the program, which waits."""
        started = self.start(f"import os, time\n{before}\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
        assert started.stdout is not None
        return started, psutil.Process(int(started.stdout.readline()))


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    started = Warm(tmp_path_factory.mktemp("warm"))
    yield started
    started.end()


@pytest.fixture
def own_warm(tmp_path: Path) -> Iterator[Warm]:
    """For a test that suspends it."""
    started = Warm(tmp_path)
    yield started
    started.end()


def test_a_program_has_its_arguments_folder_and_environment_and_the_imports_are_there(warm: Warm) -> None:
    status, output, error = warm.run(SHOWN, "one", "two words", GREETING="hello")
    assert (status, output, error) == (0, f"['one', 'two words'] {warm.folder} hello True\n", "")


def test_our_own_code_is_there_while_its_files_are_as_they_were(tmp_path: Path) -> None:
    root = tmp_path / "ours"
    shutil.copytree(ROOT / "rlhf_core", root / "rlhf_core")
    errors = root / "rlhf_core" / "errors.py"
    (root / "rlhf_core" / ".#errors.py").symlink_to("nowhere")  # as an editor locks a file
    code = "import sys; print('rlhf_core.errors' in sys.modules); import rlhf_core.errors as e; print(e.__file__)"
    warm = Warm(tmp_path, root)
    try:
        assert warm.run(code)[1] == f"True\n{errors}\n"
        # The same code elsewhere: that is another program.
        assert warm.run(code, PYTHONPATH=str(ROOT))[1] == f"False\n{ROOT / 'rlhf_core' / 'errors.py'}\n"
        errors.write_text(errors.read_text() + "\nNEW = 1\n")
        assert warm.run(f"{code}; print(e.NEW)")[1] == f"False\n{errors}\n1\n"
    finally:
        warm.end()


def test_a_plugin_is_imported_again_with_our_code(tmp_path: Path) -> None:
    """Its lines of tables, which the warm process has read, are objects of our classes as they were."""
    root, sent = tmp_path / "ours", tmp_path / "sent"
    shutil.copytree(ROOT / "rlhf_core", root / "rlhf_core")
    (about := root / "mine-1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[alignment.engines]\nmine = mine:ENTRY\n")
    line = "dataclasses.replace(rollout.EngineEntry(rollout.VllmEngineConfig, 'a', 'b', 'c', 'd', (), 'builtins:int'))"
    (root / "mine.py").write_text(f"import dataclasses\nfrom rlhf_core.config.engines import rollout\nENTRY = {line}\n")
    shutil.copytree(root, sent)
    code = "from rlhf_core.config.engines.rollout import ENGINES; import mine; print(sorted(ENGINES), mine.__file__)"
    warm = Warm(tmp_path, root)
    try:
        assert warm.run(code, PYTHONPATH=str(sent))[1:] == (f"['mine', 'vllm'] {sent / 'mine.py'}\n", "")
    finally:
        warm.end()


def test_a_run_of_weights_and_biases_imports_nothing_that_is_not_preloaded(tmp_path: Path) -> None:
    code = (
        "import importlib, sys\nfrom rlhf_core.warm.preloading import LIBRARIES\n"
        "for name in LIBRARIES:\n    if name.startswith('wandb'): importlib.import_module(name)\n"
        "import wandb\nbefore = set(sys.modules)\nrun = wandb.init(mode='offline', settings={'silent': True})\n"
        "print(sorted(name for name in sys.modules.keys() - before if name.startswith('wandb.')))\nrun.finish()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"


def test_a_module_that_was_imported_can_be_run(warm: Warm) -> None:
    command = [sys.executable, "-IS", client.__file__, "-m", "rlhf_core.errors"]
    done = subprocess.run(command, cwd=warm.folder, env=warm.environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # without the warning that there would be a second one


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_it_ends_as_the_program_ends(warm: Warm, ending: str, status: int, said: str) -> None:
    assert warm.run(f"import atexit, os, sys; {ending}") == (status, "", said)


def test_an_exception_is_printed_and_is_a_failure(warm: Warm) -> None:
    status, _, error = warm.run("raise ValueError('wrong')")
    assert status == 1
    assert error.endswith("ValueError: wrong\n")


def test_signals_reach_the_program(warm: Warm) -> None:
    handler = "import signal, sys; signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))"
    started, _ = warm.start_sleeper(handler)
    started.terminate()
    assert started.wait(timeout=30) == 7


def test_a_client_that_is_killed_takes_the_program_and_its_children_along(warm: Warm) -> None:
    child = "import subprocess; child = subprocess.Popen(['sleep', '60'])"
    started, program = warm.start_sleeper(child)
    family = [program, *program.children()]
    assert len(family) == 2
    started.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(family, timeout=30)[1] == []


@pytest.mark.parametrize("variable", ["HF_HOME", "VLLM_LOGGING_LEVEL", "PYTHONHASHSEED"])
def test_other_values_of_what_is_read_at_import_start_a_fresh_process(warm: Warm, variable: str) -> None:
    status, output, error = warm.run(SHOWN, **{variable: "1"})
    assert (status, output) == (0, f"[] {warm.folder} None False\n")
    assert error == f"started without the warm process: it was started with other values of {variable}\n"


def test_packages_installed_since_start_a_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_core.warm import server

    (site := tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])
    before = server._site_stamps()
    (site / "new").mkdir()
    assert server._site_stamps() != before


def test_without_a_warm_process_it_is_a_plain_python(warm: Warm) -> None:
    status, output, error = warm.run(SHOWN, **{client.SOCKET_VARIABLE: str(warm.folder / "none.sock")})
    assert (status, output) == (0, f"[] {warm.folder} None False\n")
    assert "started without the warm process: [Errno 2] No such file" in error
    assert warm.run(SHOWN, **{client.SOCKET_VARIABLE: ""})[1:] == (output, "")


def test_what_the_warm_process_started_ends_with_it(tmp_path: Path) -> None:
    warm = Warm(tmp_path)
    started, program = warm.start_sleeper()
    warm.end()
    assert started.wait(timeout=30) == -signal.SIGKILL
    assert psutil.wait_procs([program], timeout=30)[1] == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n",
            "1 threads were started by what was imported",
        ),
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, resource.RLIM_INFINITY))\n",
            "RLIMIT_AS was set by what was imported",
        ),
    ],
)
def test_what_all_forks_would_lack_or_inherit_is_refused(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "imported.py").write_text(code)
    command = [sys.executable, "-c", "from rlhf_core.warm.preloading import preload; preload(['imported'])"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"RuntimeError: {said}" in done.stderr


def test_a_suspended_process_starts_nothing_for_clients_that_have_not_waited_for_it(own_warm: Warm) -> None:
    own_warm.process.send_signal(signal.SIGSTOP)
    hurried = "from rlhf_core.warm import client\nclient._REPLY_SECONDS = 0.2\nexit(client.run_warm(['none.py']) or 0)"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", hurried], env=own_warm.environment, check=True, timeout=30)
    own_warm.process.send_signal(signal.SIGCONT)
    assert own_warm.run("print('answers')")[1] == "answers\n"
    assert own_warm.log.read_text().count(" ended ") <= 1


def test_the_status_of_a_program_that_ends_while_its_client_is_suspended_is_known(own_warm: Warm) -> None:
    own_warm.process.send_signal(signal.SIGSTOP)
    started = own_warm.start("import sys; sys.exit(3)")
    time.sleep(1)  # it has asked
    started.send_signal(signal.SIGSTOP)
    own_warm.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 10
    while " ended " not in own_warm.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGCONT)
    assert started.wait(timeout=20) == 3
