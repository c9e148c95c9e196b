"""The processes of a reward server, one of which is killed while it is asked; a model is no part of it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.config.rewards.rewards import HTTPReward
from rlhf_core.errors import StageError
from rlhf_core.models.folders.folder import update_json
from rlhf_core.rewards.http import RewardServer
from rlhf_core.system.network import listening
from tests.rlhf_core.reward_server.models import reward_model
from tests.services import LOOPBACK, free_ports

pytestmark = pytest.mark.parts


def test_a_killed_worker_is_started_again_and_no_answer_is_lost_or_wrong() -> None:
    (port,) = free_ports(1)
    reward = RewardServer(HTTPReward(
        type="http", url=f"http://{LOOPBACK}:{port}/score", batch_size=1, attempts=1000, timeout_seconds=300.0
    ))  # fmt: skip
    texts = ["x" * number for number in range(200)]
    command = [sys.executable, "-m", "tests.rlhf_core.reward_server.lengths", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            reward(texts[:1], texts[:1], [{}])  # it is there
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(reward, texts, texts, [{}] * 200)
                worker = worker_of(process.pid)
                worker.kill()
                assert asked.result(timeout=100).rewards == [float(number) for number in range(200)]
                assert reward(["abc"], ["p"], [{}]).rewards == [3.0]
            assert worker_of(process.pid).pid != worker.pid
        finally:
            process.terminate()
            reward.close()
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")


def test_workers_that_load_are_ended_at_once() -> None:
    command = [sys.executable, "-m", "tests.rlhf_core.reward_server.lengths", str(free_ports(1)[0]), "never"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loads\n"  # one of two; the other may not even answer yet
            workers = psutil.Process(process.pid).children()
            process.terminate()
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
        assert (process.returncode, said) == (0, "")
        psutil.wait_procs(workers, timeout=10)
        assert not any(worker.is_running() for worker in workers)


def worker_of(pid: int) -> psutil.Process:
    (worker,) = (child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline()))
    return worker


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StageError, match=f"cannot listen on {LOOPBACK}, port {port} .*give another --port"):
            listening(LOOPBACK, port)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("", "--host is empty: give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"),
        (" ", "--host is empty"),
        ("\udcff", r"--host \\udcff: no host can be called so"),
        ("ä" * 100, "no host can be called so"),
        ("192.0.2.1", r"cannot listen on 192.0.2.1, port 9 \([\w ]*\): give"),
        ("no.such.invalid", r"cannot listen on no.such.invalid, port 9 \([\w ]*\): give"),
    ],
)
def test_a_host_that_cannot_be(host: str, said: str) -> None:
    with pytest.raises(StageError, match=said):
        listening(host, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("model"))


def refused(*arguments: str, code: int = 1) -> str:
    """The one sentence of a server that has not said where it listens."""
    result = CliRunner().invoke(app, ["serve-reward", *arguments, "--port", str(free_ports(1)[0])])
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    return line


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])


def _architectures(folder: Path, names: object) -> None:
    update_json(folder / "config.json", architectures=names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_cut, "model.safetensors is damaged, or was not copied whole: fetch it again"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "there is no tokenizer.json in this folder"),
        (lambda folder: _architectures(folder, ["LlamaForCausalLM"]), "its config.json names ['LlamaForCausalLM']"),
        (lambda folder: _architectures(folder, [1]), "this is not a reward model: its config.json names [1]"),
        (lambda folder: _architectures(folder, 1), "this is not a reward model: its config.json names 1"),
    ],
)
def test_a_folder_without_a_whole_reward_model_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    change(broken)
    assert said in refused(str(broken))


@pytest.mark.parametrize("token", ["\udcff", "a\nb", "ä", "two words", "a\x7fb"])
def test_a_token_that_no_header_can_have(folder: Path, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("ALIGNMENT_SERVE_TOKEN", token)
    said = refused(str(folder))
    assert said.startswith("error: ALIGNMENT_SERVE_TOKEN: it has a sign that no HTTP header can have in a token: ")
    assert token not in said


@pytest.mark.parametrize("option", ["--workers", "--max-mib", "--max-texts", "--tokens-per-batch"])
def test_numbers_have_an_upper_bound(folder: Path, option: str) -> None:
    bound = f"error: {option}: Input should be less than or equal to "
    assert bound in refused(str(folder), option, str(10**20), code=2)
